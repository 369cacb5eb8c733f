"""What a tensor is for, told from its name: one table of rules for every format."""

from __future__ import annotations

import re
from functools import lru_cache

ROLES = ("parameter", "buffer", "optimizer", "other")

_RULES = (
    (
        "optimizer",
        r"optim(izer)?(_?states?(_dict)?|_?weights|:.*)?|opt_?state|adam\w*|sgd\w*",
        r"exp_avg(_sq)?|max_exp_avg_sq|momentum_buffer|square_avg|grad_avg|acc_delta|master_param|fp32_param",
    ),
    (
        "other",
        r"rng(_?states?)?|progress|iterator:.*|(lr_?)?schedulers?|scaler|random_states?|args|config|hyper_parameters",
        r"step|epoch|iteration|global_step|seed",
    ),
    (
        "buffer",
        r"buffers?",
        r"running_mean|running_var|num_batches_tracked|moving_mean(:0)?|moving_variance(:0)?|avg_mean|avg_var|inv_freq",
    ),
)
"""(role, a component anywhere in the name, the last component); the first rule that fits."""

_WHOLE = (
    ("buffer", re.compile(r"(.*/)?batch_normalization(_\d+)?/vars/[23]")),
    ("optimizer", re.compile(r"(.*[./])?state[./]\d+[./][^./]+")),
)
"""(role, a whole name): Keras 3 numbers a layer's weights, of which these are the moving mean and variance; torch's
optimizers keep what they know of parameter 0, 1, ... under `state`, whatever the key above it."""

_COMPILED = tuple((role, re.compile(anywhere), re.compile(last)) for role, anywhere, last in _RULES)


@lru_cache(maxsize=1 << 16)
def role_of(name: str) -> str:
    """parameter, buffer, optimizer or other, for a name whose components are split at dots and slashes."""
    for role, whole in _WHOLE:
        if whole.fullmatch(name):
            return role
    components = [part for part in re.split(r"[./]", name.lower()) if part]
    ranks = [_rank(part, False) for part in components[:-1]] + [_rank(part, True) for part in components[-1:]]
    best = min(ranks, default=len(_COMPILED))
    return _COMPILED[best][0] if best < len(_COMPILED) else "parameter"


@lru_cache(maxsize=1 << 16)
def _rank(part: str, last: bool) -> int:
    """The first rule that a component fits, where it stands; thousands of names are made of a few components."""
    fits = (at_end if last else anywhere for _, anywhere, at_end in _COMPILED)
    return next((rank for rank, rule in enumerate(fits) if rule.fullmatch(part)), len(_COMPILED))
