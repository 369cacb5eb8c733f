"""Draws against a slow one that makes one fault after the other, whatever the sizes of blocks and batches."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from files_by_hand import numbers, small_model, write_safetensors
from reference_draw import Words
from reference_plan import (
    dealt,
    elements_of,
    fields_one_an_element,
    grouped,
    guarded,
    nested,
    prefix_or_spared,
    units_of,
)

import flipper
from flipper.faults import candidates, lottery, philox, sampling, strata, taken
from flipper.faults import nested as nested_module

SEEDS = [0, 7, 2**64 - 1]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("model") / "m.safetensors")


@pytest.fixture(params=["usual", "tiny"], autouse=True)
def _blocks(request, monkeypatch):
    """The usual sizes of all blocks, or very small ones."""
    if request.param == "tiny":
        monkeypatch.setattr(candidates, "ENUMERATED", 64)
        monkeypatch.setattr(sampling, "_BATCH", 3)
        monkeypatch.setattr(lottery, "_SLACK", 2)
        monkeypatch.setattr(taken, "_SMALL_SPAN", 0)
        monkeypatch.setattr(taken, "_PER_MEMBER", 0)
        monkeypatch.setattr(nested_module, "BLOCK", 5)
        monkeypatch.setattr(strata, "BLOCK", 4)
        monkeypatch.setattr(philox, "DENSE", 0)


def drawn(path, seed, **options):
    with flipper.open(path) as checkpoint:
        plan = flipper.draw(checkpoint, flipper.FaultModel(**options), seed)
    rows = [(fault.tensor, fault.flat, fault.mask) for fault in plan]
    assert rows == sorted(rows)
    return rows


def rows_of(units, chosen):
    assert len(set(chosen)) == len(chosen)
    return sorted(units[unit].row for unit in chosen)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [0, 1, 10, 100, 957, 1000, 1900])
def test_uniform(path, seed, n):
    units = units_of(elements_of(path))
    assert drawn(path, seed, count=n) == rows_of(units, prefix_or_spared(seed, "all", len(units), n))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [1, 5, 20, 29])
def test_uniform_over_named_bits(path, seed, n):
    units = units_of([e for e in elements_of(path) if e.tag == "F32"], {3, 20, 31})
    options = {"layers": ["conv1", "fc.bias"], "bits": "31,3,20"}
    assert drawn(path, seed, count=n, **options) == rows_of(units, prefix_or_spared(seed, "all", len(units), n))


@pytest.mark.parametrize("n", [3, 40, 48])
def test_each_layer_by_itself(path, n):
    expected = []
    for name, elements in grouped(elements_of(path), "layer").items():
        units = units_of(elements)
        expected += rows_of(units, nested(7, name, len(units), n))
    assert drawn(path, 7, count=n, spread="per-layer") == sorted(expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [1, 50, 200, 600, 1900])
@pytest.mark.parametrize(
    ("options", "by", "weights"),
    [
        ({"spread": "layer-uniform"}, "layer", {}),
        ({"spread": "tensor-uniform"}, "tensor", {}),
        ({"spread": "weighted", "weights": {"conv1": 1, "bn": "2.5", "fc": Fraction(1, 2)}}, "layer",
         {"conv1": 2, "bn": 5, "fc": 1}),
    ],
)  # fmt: skip
def test_a_group_then_a_bit(path, seed, n, options, by, weights):
    groups = {name: units_of(elements) for name, elements in grouped(elements_of(path), by).items()}
    counts = dealt(
        seed, "groups", [len(units) for units in groups.values()], [weights.get(name, 1) for name in groups], n
    )
    expected = []
    for (name, units), count in zip(groups.items(), counts, strict=True):
        expected += rows_of(units, nested(seed, name, len(units), count))
    assert drawn(path, seed, count=n, **options) == sorted(expected)


def test_layers_without_a_weight_are_spared(path):
    units = units_of([e for e in elements_of(path) if e.layer == "bn"])
    rows = drawn(path, 3, count=len(units), spread="weighted", weights={"bn": 1})
    assert rows == rows_of(units, range(len(units)))


@pytest.mark.parametrize("n", [1, 60, 300, 1500])
def test_fields_by_weight(path, n):
    elements = elements_of(path)
    weights = {"sign": 1, "exponent": 8, "mantissa": 23}
    by_field = {
        name: [unit for unit in units_of(elements) if unit.element.field(unit.mask.bit_length() - 1) == name]
        for name in weights
    }
    counts = dealt(7, "fields/all", [len(units) for units in by_field.values()], list(weights.values()), n)
    expected = []
    for (name, units), count in zip(by_field.items(), counts, strict=True):
        expected += rows_of(units, nested(7, f"all/{name}", len(units), count))
    assert drawn(path, 7, count=n, field_weights=weights) == sorted(expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("burst", "n"), [(2, 5), (3, 20), (8, 40), (16, 41)])
def test_bursts_strike_an_element_once(path, seed, burst, n):
    units = units_of(elements_of(path), burst=burst)
    expected = rows_of(units, guarded(seed, "all", units, n, lambda unit: True, one_an_element=True))
    assert drawn(path, seed, count=n, burst=burst) == expected
    assert len({row[:2] for row in expected}) == n


def finite(unit):
    return math.isfinite(unit.element.value(unit.mask))


def at_most_one(unit):
    return abs(unit.element.value(unit.mask)) <= 1.0


def was_zero(unit):
    return not unit.element.before & unit.mask


@pytest.mark.parametrize("n", [1, 12, 40])
@pytest.mark.parametrize(
    ("options", "passes", "single"),
    [
        ({"finite": True}, finite, True),
        ({"max_abs": "1.0"}, at_most_one, True),
        ({"direction": "0to1"}, was_zero, False),
        ({"direction": "1to0"}, lambda unit: not was_zero(unit), False),
        ({"finite": True, "direction": "0to1", "max_abs": 1}, lambda u: at_most_one(u) and was_zero(u), True),
    ],
)
def test_guards_reject_until_enough_pass(path, n, options, passes, single):
    units = units_of(elements_of(path))
    n = min(n, len({unit.number for unit in units if passes(unit)}))
    expected = rows_of(units, guarded(7, "all", units, n, passes, single))
    assert drawn(path, 7, count=n, **options) == expected
    assert all(passes(unit) for unit in units if unit.row in expected)


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("finite", [False, True])
def test_what_few_pass_is_drawn_from_an_enumeration(tmp_path, n, finite):
    """Eight bits of 96,000 are set, so rejection gives up."""
    values = np.zeros(3000)
    values[[5, 70, 71, 900, 2300, 2301, 2999]] = [2, 2, 2, -2, 2, 2, 2]
    path = write_safetensors(tmp_path / "m.safetensors", {"a": numbers(values[:2000]), "b": numbers(values[2000:])})
    units = units_of(elements_of(path))
    expected = rows_of(units, guarded(7, "all", units, n, lambda unit: not was_zero(unit), finite))
    assert drawn(path, 7, count=n, direction="1to0", finite=finite) == expected


@pytest.mark.parametrize("n", [3, 20, 41])
def test_fields_by_weight_with_one_fault_an_element(path, n):
    elements = elements_of(path)
    weights = {"sign": 3, "exponent": 2}
    by_field = {
        name: [unit for unit in units_of(elements) if unit.element.field(unit.mask.bit_length() - 1) == name]
        for name in weights
    }
    expected = fields_one_an_element(7, by_field, weights, n, at_most_one)
    assert len({row[:2] for row in expected}) == n
    assert drawn(path, 7, count=n, field_weights={"exponent": 4, "sign": 6}, max_abs=1) == sorted(expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fraction", "n"), [("0.1", 4), ("0.1000", 4), (0.5, 21), ("0.4999", 20), (1, 41), ("0.012", 0), ("0.0122", 1)]
)
def test_a_fraction_takes_distinct_elements_and_a_bit_in_each(path, seed, fraction, n):
    elements = elements_of(path)
    expected = []
    for number in prefix_or_spared(seed, "all", len(elements), n):
        attempt = 0
        while True:  # the element's own words, masked to its width, until one is in range
            words = Words(seed, f"values/all\0slot {attempt}")
            word = [words.word() for _ in range(number + 1)][-1]
            if (bit := word & (1 << (elements[number].width - 1).bit_length()) - 1) < elements[number].width:
                break
            attempt += 1
        expected.append((elements[number].tensor, elements[number].flat, 1 << bit))
    assert drawn(path, seed, fraction=fraction) == sorted(expected)


@pytest.mark.parametrize("ber", ["0.01", "0.2", "0.7", "1"])
def test_a_bit_error_rate_strikes_a_uniform_set_of_bits(path, ber):
    units = units_of(elements_of(path))
    rows = drawn(path, 7, ber=ber)
    assert rows == rows_of(units, prefix_or_spared(7, "all", len(units), len(rows)))


@pytest.mark.parametrize("ber", ["0.01", "0.2", "0.7", "1"])
@pytest.mark.parametrize("options", [{"direction": "0to1"}, {"finite": True}, {"burst": 3}])
def test_a_rate_is_drawn_unguarded_and_thinned(path, ber, options):
    units = units_of(elements_of(path), burst=options.get("burst", 1))
    n = len(drawn(path, 7, ber=ber)) if "burst" not in options else None
    if n is None:
        from flipper.faults.counts import binomial, exact
        from flipper.faults.stream import Stream

        n = binomial(Stream(7, "counts/all"), len(units), exact(ber))
    passes = {"direction": was_zero, "finite": finite, "burst": lambda unit: True}[next(iter(options))]
    chosen = prefix_or_spared(7, "all", len(units), n) if "direction" in options else nested(7, "all", len(units), n)
    expected = []
    struck = set()
    for unit in (units[number] for number in chosen):
        if passes(unit) and ("direction" in options or unit.number not in struck):
            struck.add(unit.number)
            expected.append(unit.row)
    assert drawn(path, 7, ber=ber, **options) == sorted(expected)


@pytest.mark.parametrize("n", [1, 10, 41])
def test_random_values_are_the_words_of_the_elements(path, n):
    elements = elements_of(path)
    words = Words(7, "values/all")
    words = [words.word() for _ in elements]
    with flipper.open(path) as checkpoint:
        plan = flipper.draw(checkpoint, flipper.FaultModel(count=n, effect="random"), 7)
    expected = [
        (elements[number].tensor, elements[number].flat, "write", (1 << elements[number].width) - 1,
         words[number] & (1 << elements[number].width) - 1)
        for number in prefix_or_spared(7, "all", len(elements), n)
    ]  # fmt: skip
    assert [(f.tensor, f.flat, f.op, f.mask, f.value) for f in plan] == sorted(expected)
