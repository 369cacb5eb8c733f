"""What `--inject` names: a manifest's faults, or a TOML table that faults are drawn from when their time has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from flipper import toml
from flipper.errors import FlipperError, UsageError
from flipper.faults.model import FaultModel, parse_weights
from flipper.faults.plan import FaultPlan
from flipper.injection.manifest import read_manifest
from flipper.text_files import read_named

TARGETS: Final = ("state", "gradient", "local-gradient")
"""What is struck: parameters, buffers and optimizer; the summed gradient of a step; a rank's own, before the sum."""

_OPTIONS: Final = {
    "layer": "layers", "role": "roles", "dtype": "dtypes", "weight": "weights", "field_weight": "field_weights",
}  # fmt: skip
"""Options whose values FaultModel calls by the plural."""

_KINDS: Final = {
    **dict.fromkeys(("layers", "exclude", "roles", "dtypes"), "a text or a list of texts"),
    **dict.fromkeys(("weights", "field_weights"), "a table of numbers"),
    "effect": "a text",
    "finite": "true or false",
}
"""What TOML may hold under an option that FaultModel takes at its word."""


@dataclass(frozen=True)
class LiveFaults:
    """Faults for a running job: a plan, or a model and a seed to draw one with. target: one of TARGETS."""

    plan: FaultPlan | None
    model: FaultModel | None
    seed: int
    target: str = "state"


def read_faults(path: Path) -> LiveFaults:
    """Read a manifest or a TOML table; raises UsageError saying which key is wrong, FlipperError for a bad manifest."""
    text = read_named(path, "--inject")
    if text.lstrip().startswith("{"):
        manifest = read_manifest(path)
        return LiveFaults(manifest.table.plan(), None, manifest.seed or 0)
    try:
        table = toml.parse(text, "neither a manifest nor TOML")
        faults = table.get("faults", table)
        if not isinstance(faults, dict):
            raise UsageError("faults is no table of options")
        return faults_of(faults)
    except FlipperError as error:
        raise UsageError(f"--inject: {path}: {error}") from error


def faults_of(table: Mapping[str, Any]) -> LiveFaults:
    """The faults that a table of the options of INTERFACE sections 2 and 3 asks for; it needs a `seed`.

    Keys as on the command line with `_` for `-` (layer, bits, count ...), and `target`. Raises UsageError.
    """
    given = {_OPTIONS.get(key.replace("-", "_"), key.replace("-", "_")): value for key, value in table.items()}
    seed, target = given.pop("seed", None), given.pop("target", "state")
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise UsageError(f"the table needs a seed, 0 to 2**64 - 1, not {seed!r}")
    if target not in TARGETS:
        raise UsageError(f"no target {target!r}; known: {', '.join(TARGETS)}")
    known = {field.name for field in fields(FaultModel)}
    if unknown := sorted(given.keys() - known):
        options = ", ".join(sorted({*known, *_OPTIONS} - set(_OPTIONS.values())))
        raise UsageError(f"no option {unknown[0]!r}; known: seed, target, {options}")
    if isinstance(given.get("field_weights"), str):
        given["field_weights"] = parse_weights("field_weight", given["field_weights"].split(","))
    for key, value in given.items():
        if key in _KINDS and not _is_kind(_KINDS[key], value):
            shown = next((name for name, field in _OPTIONS.items() if field == key), key)
            raise UsageError(f"{shown} must be {_KINDS[key]}, not {value!r}")
    return LiveFaults(None, FaultModel(**given), seed, target)


def _is_kind(kind: str, value: Any) -> bool:
    match kind:
        case "a text":
            return isinstance(value, str)
        case "true or false":
            return isinstance(value, bool)
        case "a table of numbers":
            return isinstance(value, Mapping)
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(each, str) for each in value))
