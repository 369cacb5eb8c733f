"""replay: strike the faults of a manifest in another checkpoint, of any format and naming scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flipper.errors import UsageError
from flipper.faults.plan import FaultPlan, Target
from flipper.injection.manifest import read_manifest


def replay_plan(manifest: str | os.PathLike[str], renames: Sequence[str] = ()) -> FaultPlan:
    """The plan of a manifest, its tensors renamed.

    renames: "PREFIX=REPLACEMENT", or "re:REGEX=REPLACEMENT" with groups (fullmatch); each in turn, to every name.
    Raises UsageError for a rename that can't be read, matches nothing, or makes two names one; FlipperError.
    """
    record = read_manifest(Path(manifest))
    plan = record.table.plan(seed=record.seed, spec=dict(record.spec))
    names = [target.name for target in plan.targets]
    for rename in renames:
        names = _renamed(names, rename)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--rename makes two tensors one: {twice}")
    return _ordered(plan, names)


def _renamed(names: list[str], rename: str) -> list[str]:
    pattern, equals, replacement = rename.partition("=")
    if not equals:
        raise UsageError(f"--rename {rename!r} is not of the form PREFIX=REPLACEMENT or re:REGEX=REPLACEMENT")
    if not pattern.startswith("re:"):
        new = [replacement + name.removeprefix(pattern) if name.startswith(pattern) else name for name in names]
        matched = any(name.startswith(pattern) for name in names)
    else:
        try:
            regex = re.compile(pattern[3:])
            found = [regex.fullmatch(name) for name in names]
            new = [match.expand(replacement) if match else name for match, name in zip(found, names, strict=True)]
        except (re.error, IndexError) as error:
            raise UsageError(f"--rename {rename!r}: {error}") from error
        matched = any(found)
    if names and not matched:
        raise UsageError(f"--rename {rename!r} matches none of the struck tensors: {', '.join(names[:5])}")
    return new


def _ordered(plan: FaultPlan, names: list[str]) -> FaultPlan:
    """The plan under new names, its rows again by tensor name."""
    order = sorted(range(len(names)), key=names.__getitem__)
    targets = tuple(Target(names[i], plan.targets[i].dtype, plan.targets[i].shape) for i in order)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    target = number[plan.target]
    rank = np.argsort(target, kind="stable")
    columns = {name: getattr(plan, name)[rank] for name in ("flat", "op", "mask", "value")}
    return replace(plan, targets=targets, target=target[rank], **columns)
