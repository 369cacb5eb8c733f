"""draw: a checkpoint, a fault model and a seed give a plan; the same one everywhere and for ever (flipper-draw/1)."""

from __future__ import annotations

import operator
import os
import secrets
from collections.abc import Sequence

import numpy as np

from flipper.checkpoints import Checkpoint, open_checkpoint
from flipper.errors import NothingEligible, UsageError
from flipper.faults.candidates import Columns
from flipper.faults.model import FaultModel
from flipper.faults.plan import FaultPlan, Stratum, Target
from flipper.faults.population import Population, populate
from flipper.faults.strata import Drawn, Strata
from flipper.faults.stream import Stream

DRAW = "flipper-draw/1"


def new_seed() -> int:
    """A seed from the operating system, for a draw that was given none."""
    return secrets.randbits(64)


def population_of(checkpoint: Checkpoint, model: FaultModel) -> Population:
    """The eligible bits under a model.

    Raises UsageError when a bit position is named that a selected dtype lacks, or nothing matches a pattern.
    """
    tensors = model.selection.eligible(checkpoint.tensors)
    effect, spec = model.parsed_effect, model.bit_spec
    needed = effect.mask.bit_length() if effect.kind == "mask" else 0
    layouts = {tensor.dtype: tensor.layout for tensor in tensors}
    short = {dtype for dtype, layout in layouts.items() if spec.missing(layout) or needed > layout.width}
    lacking = [tensor.name for tensor in tensors if tensor.dtype in short]
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        what = f"--effect {model.effect}" if needed else f"--bits {model.bits}"
        raise UsageError(f"{what}: some positions don't exist in {shown}; leave these out by --exclude or --dtype")
    if effect.kind == "mask":
        ones = tuple(position for position in range(64) if effect.mask >> position & 1)
        return populate(tensors, lambda layout: ones)
    if effect.kind == "scale" and (whole := [t.name for t in tensors if not t.layout.real]):
        raise UsageError(f"--effect scale strikes floating-point tensors only, not {whole[0]}")
    return populate(tensors, spec.positions)


def draw(checkpoint: Checkpoint | str | os.PathLike[str], model: FaultModel, seed: int | None = None) -> FaultPlan:
    """Draw the faults of a plan.

    checkpoint: an open one, or the path of one. seed: 0 <= seed < 2**64; None takes a new one, which the plan records.
    Raises NothingEligible for an empty population, TooFewBits when the amount can't be had, UsageError.
    """
    seed = _seed(seed)
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    population = population_of(checkpoint, model)
    if not population.segments:
        raise NothingEligible(_nothing(checkpoint, model))
    return _plan(population, model, seed, list(Strata(checkpoint, model, seed, population).drawn()))


def _seed(seed: int | None) -> int:
    if seed is None:
        return new_seed()
    try:
        return Stream(operator.index(seed), "").seed
    except TypeError:
        raise UsageError(f"the seed is {seed!r}; give a whole number from 0 to 2**64 - 1") from None


def _nothing(checkpoint: Checkpoint, model: FaultModel) -> str:
    selected = model.selection.apply(checkpoint.tensors)
    kinds = sorted({tensor.dtype for tensor in selected})
    seen = f"{len(selected)} tensors selected, of dtype {', '.join(kinds) or 'none'}"
    return f"nothing to strike: {seen}; no bit of them is eligible under --bits {model.bits} (see --dtype)"


def _plan(population: Population, model: FaultModel, seed: int, strata: Sequence[Drawn]) -> FaultPlan:
    """The plan of all strata, its rows by tensor, element and bit."""
    parts: dict[str, list[Columns]] = {}
    for stratum in strata:
        flat, masks, values = stratum.columns
        for segment, rows in stratum.parts:
            parts.setdefault(segment.tensor.name, []).append((flat[rows], masks[rows], values[rows]))
    struck = [segment.tensor for segment in population.segments if segment.tensor.name in parts]
    numbers = np.arange(len(struck), dtype=np.min_scalar_type(len(struck)))
    target = np.repeat(numbers, [sum(len(columns[0]) for columns in parts[tensor.name]) for tensor in struck])
    targets = tuple(Target(tensor.name, tensor.dtype, tensor.shape) for tensor in struck)
    if len(strata) != 1:  # the faults of a single one are in order already
        ordered = [_by_bit(parts.pop(tensor.name)) for tensor in struck]
        none = (np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.uint8))
        flat, masks, values = (np.concatenate(columns) for columns in zip(none, *ordered, strict=True))
    ops = np.full(len(flat), model.parsed_effect.op, np.uint8)
    records = tuple(_record(s) for s in strata)
    return FaultPlan(targets, target, flat, ops, masks, values, seed, model.spec(), population.record(), records)


def _by_bit(parts: Sequence[Columns]) -> Columns:
    """The faults of one tensor from all strata, each of which has them in order already, by element and bit."""
    if len(parts) == 1:
        return parts[0]
    flat, masks, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    _, bit = np.frexp(masks.astype(np.float64))  # strata share a tensor only where faults are single bits
    rank = np.argsort(flat * 64 + bit, kind="stable")  # which merges ascending runs in one pass
    return flat[rank], masks[rank], values[rank]


def _record(stratum: Drawn) -> Stratum:
    probability = stratum.faults / stratum.units if stratum.units else 0.0
    return Stratum(stratum.name, stratum.bits, probability, stratum.faults)
