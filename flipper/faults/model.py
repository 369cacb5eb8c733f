"""FaultModel: which bits may be struck, how many are, and how they are spread."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

from flipper.bits import BitSpec
from flipper.errors import UsageError
from flipper.faults.counts import exact
from flipper.faults.effects import Effect
from flipper.faults.selection import Selection

SPREADS = ("uniform", "per-layer", "layer-uniform", "tensor-uniform", "weighted")
FIELDS = ("sign", "exponent", "mantissa")
DIRECTIONS = ("0to1", "1to0")

Number = int | float | str | Decimal | Fraction


@dataclass(frozen=True)
class FaultModel:
    """The rule that a plan is drawn from; the command line's options in brackets.

    layers, exclude, roles, dtypes, bits: the population (--layer, --exclude, --role, --dtype, --bits).
    count, ber, fraction, (fit, hours): the amount, exactly one; count 1 if none. Decimal text is taken exactly.
    spread, weights, field_weights: where they fall. effect, burst: what a fault does to its element.
    finite, max_abs, direction: guards on the result.
    Raises UsageError for values or combinations that make no sense.
    """

    layers: Sequence[str] = ()
    exclude: Sequence[str] = ()
    roles: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    bits: str = "any"
    count: int | None = None
    ber: Number | None = None
    fraction: Number | None = None
    fit: Number | None = None
    hours: Number | None = None
    spread: str = "uniform"
    weights: Mapping[str, Number] | None = None
    field_weights: Mapping[str, Number] | None = None
    effect: str = "flip"
    burst: int = 1
    finite: bool = False
    max_abs: Number | None = None
    direction: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "exclude", "roles", "dtypes"):
            value = getattr(self, name)
            texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
            if not all(isinstance(text, str) for text in texts):
                raise UsageError(f"{name}: {value!r:.60} is neither a text nor several")
            object.__setattr__(self, name, texts)
        for name in ("count", "burst"):
            object.__setattr__(self, name, _plain_int(getattr(self, name)))
        if (self.fit is None) != (self.hours is None):
            raise UsageError("--fit and --hours go together: a field rate and a time")
        amounts = [name for name in ("count", "ber", "fraction", "fit") if getattr(self, name) is not None]
        if len(amounts) > 1:
            raise UsageError(f"--{' and --'.join(amounts)}: give exactly one amount")
        if not amounts:
            object.__setattr__(self, "count", 1)
        _check_amount(self)
        _check_spread(self)
        _check_guards(self)
        _ = self.selection, self.bit_spec, self.parsed_effect

    @property
    def selection(self) -> Selection:
        """Which tensors may be struck."""
        return Selection(tuple(self.layers), tuple(self.exclude), tuple(self.roles), tuple(self.dtypes))

    @property
    def bit_spec(self) -> BitSpec:
        """Which bits of an element may be struck."""
        return BitSpec(self.bits)

    @property
    def parsed_effect(self) -> Effect:
        """What a fault does to its element."""
        return Effect.parse(self.effect, self.burst)

    @property
    def amount(self) -> str:
        """The name of the amount that is given: count, ber, fraction or fit."""
        return next(name for name in ("count", "ber", "fraction", "fit") if getattr(self, name) is not None)

    def spec(self) -> dict[str, Any]:
        """Every option with its value, ready for JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def parse_weights(option: str, texts: Iterable[str]) -> dict[str, str]:
    """The weights that texts of the form NAME=WEIGHT give; raises UsageError naming the option."""
    weights: dict[str, str] = {}
    for text in texts:
        name, equals, weight = text.rpartition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"{option}: {text!r} is not of the form NAME=WEIGHT")
        if name in weights:
            raise UsageError(f"{option}: {name} has two weights, {weights[name]} and {weight.strip()}; give one")
        weights[name] = weight.strip()
    return weights


def _plain_int(value: Any) -> Any:
    """Whole numbers of any type (numpy's too) as int; anything else as it is, to be refused by name."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction | Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _decimal(option: str, value: Number) -> Fraction:
    try:
        return exact(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"{option}: {value!r:.60} is not a finite decimal number") from None


def _check_amount(model: FaultModel) -> None:
    if model.count is not None and (type(model.count) is not int or model.count < 0):
        raise UsageError(f"--count: {model.count!r} is not a natural number")
    for name in ("ber", "fraction"):
        value = getattr(model, name)
        if value is not None and not 0 <= _decimal(f"--{name}", value) <= 1:
            raise UsageError(f"--{name}: {value} is not between 0 and 1")
    for name in ("fit", "hours"):
        value = getattr(model, name)
        if value is not None and _decimal(f"--{name}", value) < 0:
            raise UsageError(f"--{name}: {value} is negative")


def _check_spread(model: FaultModel) -> None:
    if model.spread not in SPREADS:
        raise UsageError(f"--spread: {model.spread!r} is none of {', '.join(SPREADS)}")
    if model.amount in ("ber", "fit") and model.spread not in ("uniform", "per-layer"):
        raise UsageError(f"--{model.amount} goes with --spread uniform or per-layer, not {model.spread}")
    if (model.spread == "weighted") != bool(model.weights):
        raise UsageError("--spread weighted and --weight PATTERN=W go together")
    if model.field_weights is not None:
        if model.amount != "count":
            raise UsageError("--field-weight goes with --count only")
        if model.parsed_effect.unit != "bit" or model.burst != 1:
            raise UsageError("--field-weight goes with faults of one bit: --effect flip, set0 or set1, no --burst")
        unknown = sorted(set(model.field_weights) - set(FIELDS))
        if unknown:
            raise UsageError(f"--field-weight: {unknown[0]!r} is none of {', '.join(FIELDS)}")
    for option, weights in (("--weight", model.weights or None), ("--field-weight", model.field_weights)):
        values = [_decimal(option, weight) for weight in ({} if weights is None else weights).values()]
        if weights is not None and (min(values, default=0) < 0 or max(values, default=0) == 0):
            raise UsageError(f"{option}: weights are not negative, and one at least is positive")


def _check_guards(model: FaultModel) -> None:
    if model.max_abs is not None and _decimal("--max-abs", model.max_abs) < 0:
        raise UsageError(f"--max-abs: {model.max_abs} is negative")
    if model.direction is not None and model.direction not in DIRECTIONS:
        raise UsageError(f"--direction: {model.direction!r} is none of {', '.join(DIRECTIONS)}")
    effect = model.parsed_effect
    if model.bits != "any" and effect.kind in ("mask", "scale"):
        raise UsageError(f"--effect {model.effect} says which bits change; leave out --bits")
