"""Selection: which tensors may be struck, by name, role and dtype."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
        spellings = [[spelling for name in tensor.names for spelling in short_names(name)] for tensor in tensors]
        for pattern in patterns:
            matched = _match(pattern, spellings, option)
            if not matched:
                raise UsageError(f"{option} {pattern!r} matches no tensor{_close_names(pattern, spellings)}")
            found += matched
        return found


def short_names(name: str) -> list[str]:
    """The spellings by which a name may be given: itself, and without its leading model., module., state_dict.."""
    spellings = [name]
    while prefix := next((p for p in OPTIONAL_PREFIXES if spellings[-1].startswith(p)), None):
        spellings.append(spellings[-1].removeprefix(prefix))
    return spellings


def _match(pattern: str, spellings: list[list[str]], option: str) -> list[int]:
    """Indexes of the tensors that fit; an exact name wins, then a module prefix or glob over the whole name."""
    exact = [index for index, names in enumerate(spellings) if pattern in names]
    if exact:
        return exact
    fits = _matcher(pattern, option)
    return [index for index, names in enumerate(spellings) if any(map(fits, names))]


def _matcher(pattern: str, option: str) -> Callable[[str], object]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]).fullmatch
        except re.error as error:
            raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error
    glob = re.compile(fnmatch.translate(pattern)).match
    prefixes = (pattern + ".", pattern + "/")
    return lambda name: name.startswith(prefixes) or glob(name)


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
