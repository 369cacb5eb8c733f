"""Weights make an uneven draw speak of the whole population: density under the draw times weight is uniform."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flipper.campaigns.census import bits_of, nth_bit
from flipper.campaigns.weighting import weight_of
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.faults.plan import FaultPlan

SIZES = {"a.weight": 6, "a.bias": 2, "b.weight": 24}
FIELDS = {"sign": 1, "exponent": 5, "mantissa": 10}


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    tensors = {name: np.arange(size, dtype=np.float16) for name, size in SIZES.items()}
    save_file(tensors, tmp_path / "clean.safetensors")
    return tmp_path / "clean.safetensors"


def where(plan: FaultPlan) -> tuple[str, int, int]:
    (fault,) = plan
    (bit,) = fault.bits
    return fault.tensor, fault.flat, bit


def test_a_census_strikes_every_eligible_bit_once(clean: Path) -> None:
    model = FaultModel(bits="exponent", exclude="b.weight")
    size = bits_of(clean, model)
    struck = {where(nth_bit(clean, model, number)) for number in range(size)}
    assert size == 8 * 5
    assert struck == {
        place for name in ("a.weight", "a.bias") for place in product([name], range(SIZES[name]), range(10, 15))
    }


def field_of(bit: int) -> str:
    return "sign" if bit == 15 else "exponent" if bit >= 10 else "mantissa"


def density(model: FaultModel, tensor: str, bit: int) -> float:
    """By hand: the probability that a draw of one fault takes a given bit."""
    groups = {"uniform": lambda name: "all", "tensor-uniform": lambda name: name}
    group = groups.get(model.spread, lambda name: name.split(".")[0])
    names = sorted({group(name) for name in SIZES})
    wanted = {name: float((model.weights or dict.fromkeys(names, 1))[name]) for name in names}
    mine = group(tensor)
    elements = sum(size for name, size in SIZES.items() if group(name) == mine)
    chance = wanted[mine] / sum(wanted.values())
    if model.field_weights:
        shares = {field: float(weight) for field, weight in model.field_weights.items()}
        field = field_of(bit)
        return chance * shares[field] / sum(shares.values()) / (elements * FIELDS[field])
    return chance / (elements * 16)


@pytest.mark.parametrize(
    "options",
    [
        {"spread": "layer-uniform"},
        {"spread": "tensor-uniform"},
        {"spread": "weighted", "weights": {"a": 3, "b": 1}},
        {"field_weights": {"sign": 1, "exponent": 8, "mantissa": 1}},
        {"spread": "layer-uniform", "field_weights": {"sign": 2, "exponent": 1, "mantissa": 1}},
    ],
)
def test_density_times_weight_is_one_over_the_population(clean: Path, options: dict[str, object]) -> None:
    model = FaultModel(count=1, **options)  # type: ignore[arg-type]
    for seed in range(30):
        plan = draw(clean, model, seed)
        tensor, _, bit = where(plan)
        assert weight_of(clean, model, plan) * density(model, tensor, bit) == pytest.approx(1 / (32 * 16))


def test_a_uniform_draw_and_one_for_each_layer_weigh_one(clean: Path) -> None:
    for model in (FaultModel(count=3), FaultModel(count=1, spread="per-layer")):
        assert weight_of(clean, model, draw(clean, model, 1)) == 1


def test_several_faults_multiply(clean: Path) -> None:
    one, two = FaultModel(count=1, spread="layer-uniform"), FaultModel(count=2, spread="layer-uniform")
    plan = draw(clean, two, 5)
    by_layer = {"a": 8 / 32 * 2, "b": 24 / 32 * 2}
    expected = np.prod([by_layer[fault.tensor[0]] for fault in plan])
    assert weight_of(clean, two, plan) == pytest.approx(expected)
    assert weight_of(clean, one, draw(clean, one, 5)) in (pytest.approx(0.5), pytest.approx(1.5))
