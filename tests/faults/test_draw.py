"""Promises of every draw: the same in every format, nested, uniform, kept for ever; what is refused."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from files_by_hand import bits, numbers, rows, small_model, write_safetensors, zeros
from reference_draw import chi_square
from scipy.stats import binom, chisquare, poisson

import flipper
from flipper.errors import FlipperError, TooFewBits, UsageError

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
WEIGHTED = {"spread": "weighted", "weights": {"conv1": 3, "bn": 1, "fc": "0.5"}}
FIELDS = {"field_weights": {"sign": 1, "exponent": 8, "mantissa": 23}}
SPREADS = [
    {},
    {"spread": "per-layer"},
    {"spread": "layer-uniform"},
    {"spread": "tensor-uniform"},
    WEIGHTED,
    FIELDS,
    {**FIELDS, "spread": "layer-uniform"},
    {**FIELDS, "finite": True},
    {**FIELDS, **WEIGHTED, "max_abs": 10},
]
EFFECTS = [
    {},
    {"effect": "set0"},
    {"effect": "random"},
    {"effect": "scale:-2"},
    {"effect": "flip:0x3"},
    {"burst": 3},
    {"finite": True},
    {"direction": "0to1"},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with flipper.open(small_model(tmp_path_factory.mktemp("model") / "m.safetensors")) as checkpoint:
        yield checkpoint


def draw(checkpoint, seed=7, **options):
    return flipper.draw(checkpoint, flipper.FaultModel(**options), seed)


@pytest.fixture(scope="module", params=["digits-cnn", "digits-mlp"])
def trio(request):
    opened = [flipper.open(SAMPLES / (request.param + ending)) for ending in (".safetensors", ".pt", ".h5")]
    yield opened
    for checkpoint in opened:
        checkpoint.close()


@pytest.mark.parametrize(
    "options",
    [
        {"count": 500},
        {"count": 200, "bits": "exponent", "role": "optimizer"},
        {"ber": "1e-3"},
        {"fraction": "0.01"},
        {"fit": 10**9, "hours": 10**5},
        {"count": 20, "spread": "per-layer", "role": "parameter"},
        {"count": 300, "spread": "layer-uniform"},
        {"count": 300, "spread": "tensor-uniform", **FIELDS},
        {"count": 300, "spread": "weighted", "weights": {"*.weight": 2, "*.exp_avg": 1, "*momentum*": 1}},
        {"count": 100, "effect": "random"},
        {"count": 100, "effect": "scale:0.3"},
        {"count": 100, "burst": 4, "finite": True},
        {"ber": "1e-3", "direction": "1to0"},
        {"count": 100, **FIELDS, "max_abs": 1},
        {"count": 10, "dtypes": ["int64", "float32"]},
    ],
)
def test_one_model_in_three_formats_has_the_same_faults(trio, options):
    options = dict(options)
    if role := options.pop("role", None):
        options["roles"] = [role]
    if "weights" in options:
        names = [tensor.name for tensor in trio[0].tensors]
        fits = {"*.weight": ".weight", "*.exp_avg": ".exp_avg", "*momentum*": "momentum"}
        options["weights"] = {p: w for p, w in options["weights"].items() if any(fits[p] in name for name in names)}
    plans = [draw(checkpoint, **options) for checkpoint in trio]
    assert rows(plans[0])
    assert rows(plans[0]) == rows(plans[1]) == rows(plans[2])
    assert plans[0].population == plans[1].population == plans[2].population
    assert plans[0].strata == plans[1].strata == plans[2].strata


def test_the_order_of_tensors_in_the_file_does_not_matter(tmp_path):
    tensors = {"a": numbers([1.0, 2.0]), "b": numbers([3.0], "F16"), "c": numbers([[4.0], [5.0]], "F64")}
    plans = []
    for name, order in (("m", "abc"), ("n", "cab")):
        path = write_safetensors(tmp_path / name, {key: tensors[key] for key in order})
        with flipper.open(path) as checkpoint:
            plans.append(rows(draw(checkpoint, count=20)))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("spread", SPREADS)
def test_smaller_doses_lie_within_greater_ones_in_every_spread(small, spread):
    doses = [1, 3, 10, 20, 41] if "finite" in spread or "max_abs" in spread else [1, 3, 10, 48, 100, 400, 900]
    if spread.get("spread") == "per-layer":
        doses = [1, 3, 10, 40, 48]
    faults = [set(rows(draw(small, count=dose, **spread))) for dose in doses]
    for smaller, greater in pairwise(faults):
        assert smaller < greater


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("spread", [{}, {"spread": "layer-uniform"}, WEIGHTED])
def test_smaller_doses_lie_within_greater_ones_for_every_effect(small, spread, effect):
    faults = [set(rows(draw(small, count=dose, **spread, **effect))) for dose in (1, 4, 10, 20)]
    for smaller, greater in pairwise(faults):
        assert smaller < greater


@pytest.mark.parametrize("options", [{}, {"direction": "0to1"}, {"finite": True}, {"burst": 2}, {"effect": "random"}])
def test_smaller_rates_lie_within_greater_ones(small, options):
    faults = [set(rows(draw(small, ber=rate, **options))) for rate in ("0.001", "0.01", "0.1", "0.25")]
    for smaller, greater in pairwise(faults):
        assert smaller <= greater


@pytest.mark.parametrize("options", [{}, {"spread": "tensor-uniform"}])
def test_smaller_fractions_lie_within_greater_ones(small, options):
    faults = [set(rows(draw(small, fraction=part, **options))) for part in ("0.05", "0.2", "0.48")]
    assert faults[0] < faults[1] < faults[2]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("effect", EFFECTS)
def test_no_unit_is_struck_twice(small, spread, effect):
    if "field_weights" in spread and ("burst" in effect or effect.get("effect", "set0") != "set0"):
        with pytest.raises(UsageError, match="--field-weight goes with faults of one bit"):
            flipper.FaultModel(**{**spread, **effect})
        return
    count = 3 if spread.get("spread") == "per-layer" else 12
    faults = rows(draw(small, count=count, **{**spread, **effect}))
    assert len(set(faults)) == len(faults)
    single = {"effect", "burst", "finite", "max_abs"} & {*spread, *effect} and effect != {"effect": "set0"}
    if single or "finite" in spread:
        assert len({fault[:2] for fault in faults}) == len(faults)


def test_bits_elements_fields_and_layers_are_struck_alike(tmp_path):
    """Uniform over all bits, whatever the sizes and widths of the tensors that hold them."""
    tensors = {"a.w": zeros("F32", 40), "a.b": zeros("F16", 10), "b.w": zeros("F64", 30)}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        struck = Counter(fault for seed in range(300) for fault in bits(draw(checkpoint, seed, count=100)))
    everything = [(name, flat, bit) for name, elements, width in (("a.w", 40, 32), ("a.b", 10, 16), ("b.w", 30, 64))
                  for flat in range(elements) for bit in range(width)]  # fmt: skip
    assert chi_square([struck[unit] for unit in everything]) > 1e-3
    by_bit = Counter()
    for (name, _, bit), times in struck.items():
        if name == "b.w":
            by_bit[bit] += times
    assert chi_square([by_bit[bit] for bit in range(64)]) > 1e-3


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"spread": "layer-uniform"}, {"a": 1, "b": 1}),
        ({"spread": "tensor-uniform"}, {"a": 2, "b": 1}),
        ({"spread": "weighted", "weights": {"a": "0.3", "b": "0.1"}}, {"a": 3, "b": 1}),
        ({}, {"a": 40 * 32 + 10 * 16, "b": 30 * 64}),
        ({"fraction": "0.0625"}, {"a": 50, "b": 30}),
    ],
)
def test_layers_are_struck_by_their_shares(tmp_path, options, shares):
    tensors = {"a.w": zeros("F32", 40), "a.b": zeros("F16", 10), "b.w": zeros("F64", 30)}
    amount = {} if "fraction" in options else {"count": 5}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        plans = [draw(checkpoint, seed, **options, **amount) for seed in range(600)]
    struck = Counter(fault.tensor[0] for plan in plans for fault in plan)
    total = sum(shares.values())
    assert sum(struck.values()) == 3000
    assert chisquare([struck["a"], struck["b"]], [3000 * shares["a"] / total, 3000 * shares["b"] / total]).pvalue > 1e-3
    within = Counter((fault.tensor, fault.flat) for plan in plans for fault in plan if fault.tensor == "b.w")
    assert chi_square([within["b.w", flat] for flat in range(30)]) > 1e-3


@pytest.mark.parametrize("guard", [{}, {"finite": True}])
def test_fields_are_struck_by_their_weights_and_uniformly_within(tmp_path, guard):
    weights = {"sign": 1, "exponent": "1.5", "mantissa": Fraction(1, 2)}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", {"a": numbers([0.5] * 200)})) as checkpoint:
        plans = [draw(checkpoint, seed, count=10, field_weights=weights, **guard) for seed in range(300)]
    struck = Counter(bit for plan in plans for _, _, bit in bits(plan))
    fields = [struck[31], sum(struck[bit] for bit in range(23, 31)), sum(struck[bit] for bit in range(23))]
    assert chisquare(fields, [1000, 1500, 500]).pvalue > 1e-3
    assert chi_square([struck[bit] for bit in range(23, 31)]) > 1e-3
    assert chi_square([struck[bit] for bit in range(23)]) > 1e-3


def test_a_fraction_strikes_elements_alike_and_bits_of_each_alike(tmp_path):
    tensors = {"a": zeros("F32", 20), "b": zeros("F64", 20), "c": zeros("F16", 20)}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        named = [bits(draw(checkpoint, seed, fraction="0.2", bits="0-2,5,7")) for seed in range(300)]
        mixed = [fault for seed in range(300) for fault in bits(draw(checkpoint, seed, fraction="0.5"))]
    faults = [fault for plan in named for fault in plan]
    elements = Counter(fault[:2] for fault in faults)
    assert chi_square([elements[name, flat] for name in "abc" for flat in range(20)]) > 1e-3
    positions = Counter(fault[2] for fault in faults)
    assert chi_square([positions[bit] for bit in (0, 1, 2, 5, 7)]) > 1e-3
    for name, width in (("a", 32), ("b", 64), ("c", 16)):
        positions = Counter(fault[2] for fault in mixed if fault[0] == name)
        assert chi_square([positions[bit] for bit in range(width)]) > 1e-3


@pytest.mark.parametrize("options", [{"burst": 4}, {"burst": 30}])
def test_windows_of_a_burst_are_struck_alike(tmp_path, options):
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", {"a": zeros("F32", 10)})) as checkpoint:
        faults = [fault for seed in range(800) for fault in rows(draw(checkpoint, seed, count=3, **options))]
    windows = Counter(fault[3] for fault in faults)
    assert len(windows) == 33 - options["burst"]
    assert chi_square(list(windows.values())) > 1e-3
    assert chi_square(list(Counter(fault[1] for fault in faults).values())) > 1e-3


def test_guarded_draws_are_uniform_over_what_passes(tmp_path):
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", {"a": numbers([1.0, 2.0, 3.0])})) as checkpoint:
        plans = [bits(draw(checkpoint, seed, count=2, direction="1to0")) for seed in range(900)]
        rates = [bits(draw(checkpoint, seed, ber="0.8", finite=True)) for seed in range(600)]
    ones = {flat: [bit for bit in range(32) if pattern >> bit & 1]
            for flat, pattern in enumerate((0x3F800000, 0x40000000, 0x40400000))}  # fmt: skip
    struck = Counter(fault for plan in plans for fault in plan)
    assert chi_square([struck["a", flat, bit] for flat, held in ones.items() for bit in held]) > 1e-3
    assert sum(struck.values()) == 1800
    # One of several that pass in an element stays, each as likely; bit 30 of 1.0 would make it infinite.
    first = Counter(bit for plan in rates for _, flat, bit in plan if flat == 0)
    assert first[30] == 0
    assert chi_square([first[bit] for bit in range(32) if bit != 30]) > 1e-3


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_bit_error_rate_strikes_each_bit_independently(tmp_path, per_layer):
    tensors = {"a.w": zeros("F32", 10), "b.w": zeros("F16", 20)}
    spread = {"spread": "per-layer"} if per_layer else {}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        counts = Counter(len(draw(checkpoint, seed, ber="0.01", **spread)) for seed in range(2000))
    observed = [counts[n] for n in range(14)] + [sum(times for n, times in counts.items() if n > 13)]
    expected = [2000 * binom.pmf(n, 640, 0.01) for n in range(14)] + [2000 * binom.sf(13, 640, 0.01)]
    assert chisquare(observed, expected).pvalue > 1e-3


def test_a_field_rate_gives_a_poisson_number_of_upsets(tmp_path):
    """2000 FIT per Mbit over 10**9 hours in 3200 bits: 6.4 upsets."""
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", {"a": zeros("F32", 100)})) as checkpoint:
        counts = Counter(len(draw(checkpoint, seed, fit=2000, hours=10**9)) for seed in range(2000))
        assert len(draw(checkpoint, fit=0, hours=10**9)) == len(draw(checkpoint, fit=10, hours=0)) == 0
    observed = [counts[n] for n in range(14)] + [sum(times for n, times in counts.items() if n > 13)]
    expected = [2000 * poisson.pmf(n, 6.4) for n in range(14)] + [2000 * poisson.sf(13, 6.4)]
    assert chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("options", [{}, {"burst": 2}, {"finite": True}, {"effect": "random"}, {"direction": "0to1"}])
def test_rates_of_0_and_1_strike_nothing_and_all(small, options):
    assert len(draw(small, ber=0, **options)) == 0
    faults = rows(draw(small, ber=1, **options))
    if not options:
        assert len(faults) == 1904
    elif "direction" not in options:
        assert len({fault[:2] for fault in faults}) == len(faults) == 41


def test_no_faults_are_a_plan_too(small):
    for options in ({"count": 0}, {"ber": 0}, {"fraction": 0}, {"fit": 0, "hours": 1}, {"count": 0, **FIELDS}):
        plan = draw(small, **options)
        assert len(plan) == 0
        assert list(plan) == []
        assert plan.population["bits"] == 1904


def test_one_fault_is_drawn_by_default(small):
    assert len(draw(small)) == 1


def test_strata_tell_the_probability_of_a_unit(small):
    (whole,) = draw(small, count=100).strata
    assert (whole.name, whole.bits, whole.faults, whole.probability) == ("all", 1904, 100, 100 / 1904)
    layers = draw(small, count=5, spread="per-layer").strata
    assert [(s.name, s.bits, s.faults) for s in layers] == [("bn", 48, 5), ("conv1", 512, 5), ("fc", 1344, 5)]
    assert [s.probability for s in layers] == [5 / 48, 5 / 512, 5 / 1344]
    fields = draw(small, count=100, **FIELDS).strata
    assert [s.name for s in fields] == ["all/sign", "all/exponent", "all/mantissa"]
    assert sum(s.bits for s in fields) == 1904
    assert sum(s.faults for s in fields) == 100
    assert [s.probability for s in draw(small, fraction="0.5").strata] == [21 / 41]


@pytest.mark.parametrize("spread", SPREADS)
def test_all_but_one_are_struck_at_once(tmp_path, spread):
    shapes = {"conv1.w": ("F32", 2000), "conv1.b": ("F32", 3), "bn.w": ("F16", 5), "fc.w": ("F32", 70)}
    tensors = {name: zeros(*shape) for name, shape in shapes.items()}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        guarded = "finite" in spread or "max_abs" in spread
        total = 2078 if guarded else 2073 * 32 + 80
        if spread.get("spread") == "per-layer":
            assert len(draw(checkpoint, count=80, **spread)) == 240
            with pytest.raises(TooFewBits, match="layer bn: 81 asked for, but only 80"):
                draw(checkpoint, count=81, **spread)
            return
        for spared in (0, 1):
            assert len(set(rows(draw(checkpoint, count=total - spared, **spread)))) == total - spared
        with pytest.raises(TooFewBits) as caught:
            draw(checkpoint, count=total + 1, **spread)
        assert caught.value.available == total
        assert caught.value.exit_code == 1


def test_fields_without_a_weight_do_not_count_as_room(tmp_path):
    """A layer of one element has 8 exponent bits; the other 24 can't be struck."""
    tensors = {"a.w": zeros("F32", 1), "b.w": zeros("F32", 100)}
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as checkpoint:
        plan = draw(checkpoint, count=300, spread="layer-uniform", field_weights={"exponent": 1})
        assert Counter(fault.tensor for fault in plan) == {"a.w": 8, "b.w": 292}
        with pytest.raises(TooFewBits):
            draw(checkpoint, count=809, field_weights={"exponent": 2, "sign": 0})
        assert len(draw(checkpoint, count=808, field_weights={"exponent": 2, "sign": 0})) == 808


def test_weights_may_lie_far_apart(small):
    faults = rows(draw(small, count=600, spread="weighted", weights={"conv1": "1e15", "bn": 1, "fc": "0.1"}))
    struck = Counter(fault[0].split(".")[0] for fault in faults)
    assert struck["conv1"] == 512
    assert struck["bn"] > 30
    with pytest.raises(UsageError, match="fewer digits"):
        draw(small, spread="weighted", weights={"conv1": "1e30", "fc": 1})
    many = rows(draw(small, count=41, field_weights={"sign": "1e15", "mantissa": 1}, finite=True))
    assert Counter(fault[3].bit_count() for fault in many) == {1: 41}


def test_thousands_of_tiny_layers_are_dealt_with_at_once(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {f"a{n}.w": numbers([2.0]) for n in range(3000)})
    with flipper.open(path) as checkpoint:
        assert len(draw(checkpoint, count=2999, spread="layer-uniform", bits="30", direction="1to0")) == 2999


@pytest.mark.parametrize(
    "options",
    [
        {"count": 1, "ber": 0.1},
        {"ber": 0.1, "fraction": 0.1},
        {"count": 1, "fit": 1, "hours": 1},
        {"fit": 1},
        {"hours": 1},
        {"count": -1},
        {"count": 1.5},
        {"count": True},
        {"count": "1"},
        {"ber": 1.1},
        {"ber": "-0.1"},
        {"ber": "x"},
        {"ber": float("nan")},
        {"fraction": "1.0001"},
        {"fit": -1, "hours": 1},
        {"fit": 1, "hours": "inf"},
        {"spread": "even"},
        {"ber": 0.1, "spread": "layer-uniform"},
        {"ber": 0.1, "spread": "tensor-uniform"},
        {"fit": 1, "hours": 1, "spread": "weighted", "weights": {"a": 1}},
        {"spread": "weighted"},
        {"spread": "weighted", "weights": {}},
        {"weights": {"a": 1}},
        {"spread": "layer-uniform", "weights": {"a": 1}},
        {"spread": "weighted", "weights": {"a": 0}},
        {"spread": "weighted", "weights": {"a": -1, "b": 2}},
        {"spread": "weighted", "weights": {"a": "many"}},
        {"field_weights": {"sign": 1}, "ber": 0.1},
        {"field_weights": {"sign": 1}, "fraction": 0.1},
        {"field_weights": {"sign": 1}, "fit": 1, "hours": 1},
        {"field_weights": {"sign": 1}, "burst": 2},
        {"field_weights": {"sign": 1}, "effect": "random"},
        {"field_weights": {"sign": 1}, "effect": "scale:2"},
        {"field_weights": {"sign": 1}, "effect": "flip:0x1"},
        {"field_weights": {"any": 1}},
        {"field_weights": {"sign": 0}},
        {"field_weights": {}},
        {"burst": 0},
        {"burst": 2.5},
        {"burst": 2, "effect": "random"},
        {"burst": 2, "effect": "scale:2"},
        {"burst": 2, "effect": "flip:0x3"},
        {"max_abs": -1},
        {"max_abs": "nan"},
        {"direction": "up"},
        {"bits": "sign", "effect": "flip:0x1"},
        {"bits": "sign", "effect": "scale:2"},
        {"bits": "lsb"},
    ],
)
def test_values_and_combinations_without_a_sense_are_refused(options):
    with pytest.raises(UsageError, match="--") as caught:
        flipper.FaultModel(**options)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7"])
def test_other_seeds_are_refused(small, seed):
    with pytest.raises(UsageError, match="whole number from 0 to 2"):
        draw(small, seed)


def test_whole_numbers_of_numpy_are_taken_and_all_is_ready_for_json(small):
    plan = draw(small, np.uint64(7), count=np.int64(10), burst=np.int32(1), max_abs=Fraction(7, 2), **WEIGHTED)
    assert rows(plan) == rows(draw(small, 7, count=10, max_abs="3.5", **WEIGHTED))
    spec = json.loads(json.dumps({"seed": plan.seed, **plan.spec}, allow_nan=False))
    assert spec["seed"] == 7
    assert spec["count"] == 10
    assert spec["max_abs"] == "7/2"


def test_without_a_seed_a_new_one_is_drawn_and_recorded(small):
    plan = draw(small, None, count=20)
    assert 0 <= plan.seed < 2**64
    assert rows(plan) == rows(draw(small, plan.seed, count=20))
    assert draw(small, None).seed != plan.seed


def test_more_faults_than_a_plan_can_hold_are_refused(tmp_path):
    """A rate of one half over terabits: at once, not after the memory is full."""
    path = tmp_path / "m.safetensors"
    header = {"a": {"dtype": "F32", "shape": [10**11], "data_offsets": [0, 4 * 10**11]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 4 * 10**11)
    with flipper.open(path) as checkpoint:
        for options in ({"ber": "0.5"}, {"fraction": "0.1"}, {"count": 10**10}, {"fit": 10**10, "hours": "1e900"}):
            with pytest.raises(FlipperError, match="more faults than a plan can hold"):
                draw(checkpoint, **options)
        assert len(draw(checkpoint, count=1000, finite=True)) == 1000
        assert len(draw(checkpoint, count=1000, spread="layer-uniform", burst=2)) == 1000
