"""Selection: which tensors may be struck, by name, role and dtype."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from flipper import bits
from flipper.checkpoints.roles import ROLES
from flipper.checkpoints.tensor import Tensor
from flipper.errors import UsageError

OPTIONAL_PREFIXES = ("model.", "module.", "state_dict.")


@dataclass(frozen=True)
class Selection:
    """The tensors that `--layer`, `--exclude`, `--role` and `--dtype` leave; empty tuples leave the default ones.

    layers, excluded: patterns: an exact name, a module prefix, a case-sensitive glob, or "re:REGEX" (fullmatch).
    roles: of parameter, buffer, optimizer, other. dtypes: canonical names; () means every float and complex dtype.
    """

    layers: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for role in self.roles:
            if role not in ROLES:
                raise UsageError(f"unknown role {role!r}; known: {', '.join(ROLES)}")
        for dtype in self.dtypes:
            bits.layout(dtype)

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The selected tensors, unsupported ones included, in the order given.

        Raises UsageError when a pattern matches no tensor.
        """
        kept = set(self._named(tensors, self.layers, "--layer")) if self.layers else set(range(len(tensors)))
        kept -= set(self._named(tensors, self.excluded, "--exclude"))
        return [tensor for index, tensor in enumerate(tensors) if index in kept and self._kind_fits(tensor)]

    def eligible(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The selected tensors whose bits may be struck: supported, of a dtype that was named or is real."""
        return [tensor for tensor in self.apply(tensors) if tensor.supported and self._dtype_struck(tensor)]

    def _kind_fits(self, tensor: Tensor) -> bool:
        return (not self.roles or tensor.role in self.roles) and (not self.dtypes or tensor.dtype in self.dtypes)

    def _dtype_struck(self, tensor: Tensor) -> bool:
        return bool(self.dtypes) or tensor.layout.real

    def _named(self, tensors: Sequence[Tensor], patterns: Iterable[str], option: str) -> list[int]:
        found: list[int] = []
        spellings = [_spellings(tensor.names) for tensor in tensors]
        for pattern in patterns:
            matched = _match(pattern, spellings, option)
            if not matched:
                raise UsageError(f"{option} {pattern!r} matches no tensor{_close_names(pattern, spellings)}")
            found += matched
        return found


def weights_of(weights: Mapping[str, Fraction], tensors: Sequence[Tensor]) -> dict[str, Fraction]:
    """The weight of each layer that a pattern names: by one of its tensors, else by the layer's own name.

    Of several patterns that fit a layer the last counts. Raises UsageError when a pattern fits none.
    """
    found: dict[str, Fraction] = {}
    tensor_names = [_spellings(tensor.names) for tensor in tensors]
    layer_names = [_spellings([tensor.layer]) for tensor in tensors]
    for pattern, weight in weights.items():
        matched = _match(pattern, tensor_names, "--weight") or _match(pattern, layer_names, "--weight")
        if not matched:
            raise UsageError(f"--weight {pattern!r} matches no selected layer{_close_names(pattern, tensor_names)}")
        found.update((tensors[index].layer, weight) for index in matched)
    return found


def _spellings(names: Iterable[str]) -> list[str]:
    return [spelling for name in names for spelling in short_names(name)]


def short_names(name: str) -> list[str]:
    """The spellings by which a name may be given: itself, and without its leading model., module., state_dict.."""
    spellings = [name]
    while prefix := next((p for p in OPTIONAL_PREFIXES if spellings[-1].startswith(p)), None):
        spellings.append(spellings[-1].removeprefix(prefix))
    return spellings


def _match(pattern: str, spellings: list[list[str]], option: str) -> list[int]:
    """Indexes of the tensors that fit: by an exact name, else by a module prefix, else by a glob or expression."""
    for fits in _matchers(pattern, option):
        found = [index for index, names in enumerate(spellings) if any(map(fits, names))]
        if found:
            return found
    return []


def _matchers(pattern: str, option: str) -> Iterator[Callable[[str], object]]:
    """The ways to read a pattern; the first that fits any tensor is meant."""
    yield pattern.__eq__
    if pattern.startswith("re:"):
        try:
            yield re.compile(pattern[3:]).fullmatch
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error
        return
    prefixes = (pattern + ".", pattern + "/")
    yield lambda name: name.startswith(prefixes)
    yield re.compile(fnmatch.translate(pattern)).match


def _close_names(pattern: str, spellings: list[list[str]]) -> str:
    candidates: set[str] = set()
    for names in spellings:
        for name in names:
            parts = re.split(r"([./])", name)
            candidates.update("".join(parts[:end]) for end in range(1, len(parts) + 1, 2))
    close = difflib.get_close_matches(pattern, sorted(candidates)[:20_000], n=5, cutoff=0.5)
    if close:
        return f"; close names: {', '.join(close)}"
    return f"; the names are like {', '.join(sorted(names[0] for names in spellings)[:5])}" if spellings else ""
