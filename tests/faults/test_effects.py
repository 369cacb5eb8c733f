"""What a fault does to its element, and what guards let through, told by struct and ml_dtypes."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from files_by_hand import numbers, write_safetensors, zeros
from scipy.stats import chisquare

import flipper
from flipper.errors import NothingEligible, TooFewBits, UsageError


@pytest.fixture
def checkpoint(tmp_path):
    """Sixty float32 numbers, with zeros, infinities and NaN among them, and some integers."""
    values = np.concatenate([np.linspace(-3, 3, 50), [0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, 1e-40, 2.0, 1.0, -4.0]])
    integers = {"i": numbers([-128, -5, 0, 7, 127], "I8"), "l": numbers([-(2**63), 2**63 - 1], "I64")}
    tensors = {"f": numbers(values), **integers}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as opened:
        yield opened


def before(checkpoint, fault):
    tensor = checkpoint.tensor(fault.tensor)
    return int(checkpoint.read_bits(tensor, np.array([fault.flat]))[0])


def after(checkpoint, fault):
    if fault.op == "flip":
        return before(checkpoint, fault) ^ fault.mask
    return before(checkpoint, fault) & ~fault.mask | fault.value & fault.mask


def number(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def draw(checkpoint, **options):
    return list(flipper.draw(checkpoint, flipper.FaultModel(**options), seed=5))


@pytest.mark.parametrize(
    ("effect", "op", "value"), [("flip", "flip", None), ("set0", "write", 0), ("set1", "write", 1)]
)
@pytest.mark.parametrize("burst", [1, 3])
def test_bits_are_flipped_or_set(checkpoint, effect, op, value, burst):
    for fault in draw(checkpoint, count=50, effect=effect, burst=burst):
        assert fault.op == op
        assert fault.value == (None if value is None else value * fault.mask)
        assert list(fault.bits) == list(range(fault.bits[0], fault.bits[0] + burst))


def test_bursts_lie_wholly_in_eligible_bits(checkpoint):
    faults = draw(checkpoint, count=60, burst=2, bits="0-1,8-10,20,31")
    assert {fault.mask for fault in faults} <= {0b11, 0b11 << 8, 0b11 << 9}
    assert len({fault.flat for fault in faults}) == 60
    assert {fault.mask for fault in draw(checkpoint, count=60, burst=8, bits="exponent")} == {0xFF << 23}


def test_the_eligible_bits_are_redrawn_at_random(checkpoint):
    faults = draw(checkpoint, count=60, effect="random", bits="exponent,0")
    assert {fault.op for fault in faults} == {"write"}
    assert {fault.mask for fault in faults} == {0xFF << 23 | 1}
    assert all(fault.value & ~fault.mask == 0 for fault in faults)
    ones = sum(fault.value.bit_count() for fault in faults)
    assert abs(ones - 60 * 9 / 2) < 5 * math.sqrt(60 * 9 / 4)
    assert len({fault.flat for fault in faults}) == 60


def test_a_mask_takes_the_place_of_bits(checkpoint):
    faults = draw(checkpoint, count=60, effect="flip:0x80000001")
    assert {(fault.op, fault.mask, fault.value) for fault in faults} == {("flip", 0x80000001, None)}
    with pytest.raises(UsageError, match="leave out --bits"):
        draw(checkpoint, effect="flip:0x1", bits="sign")
    with pytest.raises(TooFewBits, match="61 asked for, but only 60"):
        draw(checkpoint, count=61, effect="flip:0x1")


@pytest.mark.parametrize("factor", ["2", "0.1", "-3.7", "1e30", "1e-30", "0", "1e300"])
def test_scaled_values_are_written_and_a_nan_keeps_its_bits(checkpoint, factor):
    for fault in draw(checkpoint, count=60, effect=f"scale:{factor}"):
        assert (fault.op, fault.mask) == ("write", 0xFFFFFFFF)
        was = number(before(checkpoint, fault))
        with np.errstate(all="ignore"):
            expected = np.float32(np.float64(was) * float(factor))
        if math.isnan(was):
            assert fault.value == before(checkpoint, fault)
        elif math.isnan(expected):
            assert fault.value == 0x7FC00000
        else:
            assert struct.pack("<f", number(fault.value)) == expected.tobytes()


def test_scaling_rounds_once_in_narrow_dtypes(tmp_path):
    data = np.arange(0, 2**15, 7, dtype=np.uint16)
    path = write_safetensors(tmp_path / "m.safetensors", {"a": ("BF16", [len(data)], data.tobytes())})
    with flipper.open(path) as checkpoint:
        faults = draw(checkpoint, fraction=1, effect="scale:1.1")
    with np.errstate(invalid="ignore"):
        values = data.view(ml_dtypes.bfloat16).astype(np.float64)
    for fault in faults:
        exact = values[fault.flat] * 1.1
        got = float(np.array([fault.value], np.uint16).view(ml_dtypes.bfloat16)[0])
        if math.isfinite(got):
            ulp = 2.0 ** (max(math.frexp(exact)[1] - 1, -126) - 7)
            assert abs(got - exact) <= ulp / 2


@pytest.mark.parametrize("effect", ["", "Flip", "set2", "flip:", "flip:0x", "flip:0x0", "flip:12", "flip:0x" + "1" * 17,
                                    "scale", "scale:", "scale:x", "scale:nan", "scale:inf", "scale:1e999"])  # fmt: skip
def test_other_effects_are_refused(effect):
    with pytest.raises(UsageError, match="--effect"):
        flipper.FaultModel(effect=effect)


def test_integers_cannot_be_scaled(checkpoint):
    with pytest.raises(UsageError, match="floating-point tensors only, not i"):
        draw(checkpoint, effect="scale:2", dtypes=["int8"])


@pytest.mark.parametrize("amount", ["count", "ber", "fraction"])
@pytest.mark.parametrize("effect", ["flip", "random", "scale:1e30", "flip:0x70000000", "set1"])
def test_guards_hold_for_every_fault(checkpoint, amount, effect):
    guards = [("finite", True, math.isfinite), ("max_abs", 2.5, lambda value: abs(value) <= 2.5)]
    for guard, bound, holds in guards:
        model = {guard: bound, "effect": effect, "exclude": ["i", "l"]}
        with pytest.raises(TooFewBits) as caught:
            draw(checkpoint, **model, count=61)
        possible = caught.value.available
        amounts = {"count": possible, "ber": "0.3", "fraction": f"{possible / 60:.6f}"}
        faults = draw(checkpoint, **model, **{amount: amounts[amount]})
        assert len(faults) == possible or amount == "ber"
        assert all(holds(number(after(checkpoint, fault))) for fault in faults)
        assert len({fault.flat for fault in faults}) == len(faults)


@pytest.mark.parametrize(("direction", "old"), [("0to1", 0), ("1to0", 1)])
@pytest.mark.parametrize("amount", [{"count": 300}, {"ber": 1}])
def test_a_direction_takes_bits_that_hold_the_other_value(checkpoint, direction, old, amount):
    faults = draw(checkpoint, direction=direction, **amount)
    assert {before(checkpoint, fault) >> fault.bits[0] & 1 for fault in faults} == {old}
    tensor = checkpoint.tensor("f")
    ones = sum(int(bits).bit_count() for bits in checkpoint.read_bits(tensor, np.arange(60)))
    if "ber" in amount:
        assert len(faults) == (ones if old else 60 * 32 - ones)


def test_a_direction_of_bursts_holds_for_every_bit(checkpoint):
    faults = draw(checkpoint, count=20, burst=2, direction="1to0", layers=["f"])
    assert all(before(checkpoint, fault) & fault.mask == fault.mask for fault in faults)


def test_bounds_of_integers_are_exact(checkpoint):
    faults = draw(checkpoint, ber=1, max_abs=2**63 - 1, dtypes=["int64"], bits="sign,0,1")
    assert len(faults) == 2  # one an element; -2**63 itself is out of bounds
    with pytest.raises(TooFewBits, match="only 0 places pass"):
        draw(checkpoint, count=1, max_abs=2**63 - 10, dtypes=["int64"], bits="1-2")
    assert len(draw(checkpoint, count=2, max_abs=2**63, dtypes=["int64"], bits="1-2")) == 2
    assert len(draw(checkpoint, ber=1, finite=True, dtypes=["int8"])) == 5


def test_a_bound_beyond_all_floats_lets_every_finite_number_through(checkpoint):
    everything = draw(checkpoint, ber=1, finite=True)
    assert draw(checkpoint, ber=1, max_abs="1e400") == everything


def test_too_few_that_pass_are_counted(checkpoint):
    passing = 0
    elements = set()
    tensor = checkpoint.tensor("f")
    for flat, bits in enumerate(checkpoint.read_bits(tensor, np.arange(60)).tolist()):
        for position in range(32):
            if abs(number(bits ^ 1 << position)) <= 1:
                passing += 1
                elements.add(flat)
    for options in ({"count": 61}, {"count": 60}, {"count": 60, "spread": "layer-uniform"}, {"fraction": 1}):
        with pytest.raises(TooFewBits, match=str(len(elements))) as caught:
            draw(checkpoint, max_abs=1, **options)
        assert caught.value.available == len(elements)
        assert caught.value.exit_code == 1
    assert len(draw(checkpoint, max_abs=1, count=len(elements))) == len(elements)
    with pytest.raises(TooFewBits, match=f"only {passing:,} places pass, in {len(elements)} elements"):
        draw(checkpoint, max_abs=1, count=60)


def test_groups_say_how_many_pass_in_all_of_them(tmp_path):
    """Where each group is exhausted by a guard before its size, also those that had enough for their share."""
    twos = {"a.w": [2.0] * 3 + [0.0] * 97, "b.w": [2.0] * 40 + [0.0] * 60, "c.w": [2.0] * 9}
    tensors = {name: numbers(values) for name, values in twos.items()}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        model = {"bits": "30", "direction": "1to0"}
        for spread in ({"spread": "layer-uniform"}, {"spread": "tensor-uniform"}):
            assert len(draw(checkpoint, count=52, **model, **spread)) == 52
            with pytest.raises(TooFewBits, match="60 asked for, but only 52 places pass"):
                draw(checkpoint, count=60, **model, **spread)
        with pytest.raises(TooFewBits, match="only 49 places pass"):
            draw(checkpoint, count=50, spread="weighted", weights={"b": 1, "c": 3}, **model)
        with pytest.raises(TooFewBits, match="layer a: 4 asked for, but only 3"):
            draw(checkpoint, count=4, spread="per-layer", **model)
        faults = draw(checkpoint, count=52, field_weights={"exponent": 1}, spread="layer-uniform", **model)
        assert len(faults) == 52


def test_where_nothing_passes_that_is_said_at_once(tmp_path):
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", {"a": zeros("F32", 300, 1000)})) as checkpoint:
        for options in ({}, {"spread": "layer-uniform"}, {"fraction": "0.1"}, {"effect": "set0", "count": 3}):
            with pytest.raises(TooFewBits, match="only 0 "):
                draw(checkpoint, direction="1to0", bits="exponent", **options)
        assert draw(checkpoint, direction="1to0", count=0) == []
        assert draw(checkpoint, direction="1to0", ber="0.00001") == []


def test_a_guarded_fraction_strikes_any_bit_that_passes(tmp_path):
    """Two of 32 bits pass: each element is struck in one of them, as likely the one as the other."""
    one_bit, two_bits = 1 << 5, 1 << 5 | 1 << 20
    data = np.array([one_bit] * 1000 + [two_bits] * 2000 + [0] * 500, "<u4").tobytes()
    path = write_safetensors(tmp_path / "m.safetensors", {"a": ("F32", [3500], data)})
    with flipper.open(path) as checkpoint:
        faults = draw(checkpoint, fraction="0.857142857", direction="1to0")
        with pytest.raises(TooFewBits, match="only 3,000 places pass"):
            draw(checkpoint, fraction=1, direction="1to0")
    assert [fault.flat for fault in faults] == list(range(3000))
    assert {fault.mask for fault in faults[:1000]} == {one_bit}
    low = sum(fault.mask == one_bit for fault in faults[1000:])
    assert chisquare([low, 2000 - low]).pvalue > 1e-3


def test_weights_of_fields_without_eligible_bits_leave_nothing(checkpoint):
    with pytest.raises(NothingEligible, match="fields with a weight"):
        draw(checkpoint, bits="exponent", field_weights={"sign": 1})
