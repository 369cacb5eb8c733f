"""The same plan on live torch tensors as on files: bit for bit the same, whatever the dtype, strides or device view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_makers import drawn, listed
from safetensors.torch import save_file

import flipper
from flipper.errors import MismatchError, UsageError
from flipper.injection.inject import inject
from flipper.injection.replay import replay_plan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "bool",
)  # fmt: skip
EFFECTS = ("flip", "set0", "set1", "random", "flip:0x1")


def random_tensor(dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty((), dtype=kind).element_size()
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(kind).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"t.{dtype}": random_tensor(dtype, 6, 5) for dtype in DTYPES}


@pytest.mark.parametrize("effect", EFFECTS)
def test_file_and_memory_agree_in_every_dtype(effect: str, tmp_path: Path) -> None:
    live = state()
    torch.save(live, tmp_path / "a.pt")
    plan = drawn(tmp_path / "a.pt", dtypes=DTYPES, count=60, effect=effect)
    made = inject(tmp_path / "a.pt", tmp_path / "b.pt", plan)
    assert flipper.strike(live, plan) == len(made.faults)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {name: raw(tensor) for name, tensor in live.items()} == {name: raw(t) for name, t in loaded.items()}
    again = state()
    flipper.strike(again, replay_plan(made.path))
    assert {name: raw(tensor) for name, tensor in again.items()} == {name: raw(t) for name, t in loaded.items()}


def test_scaling_agrees_too(tmp_path: Path) -> None:
    live = {f"t.{dtype}": torch.randn(40).to(getattr(torch, dtype)) for dtype in DTYPES[:4]}
    save_file(live, tmp_path / "a.safetensors")
    plan = drawn(tmp_path / "a.safetensors", count=30, effect="scale:-2.5")
    before = {name: tensor.clone() for name, tensor in live.items()}
    made = inject(tmp_path / "a.safetensors", tmp_path / "b", plan)
    flipper.strike(live, plan)
    for row in made.faults:
        old, new = before[row["tensor"]][row["flat"]], live[row["tensor"]][row["flat"]]
        assert torch.equal(new, (old.double() * -2.5).to(old.dtype))


def test_packed_elements_share_a_byte(tmp_path: Path) -> None:
    """float4: a flip in one half of a byte and a write in the other."""
    live = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)
    plan = listed("w", (0, "flip", 0b1000, 0), (1, "write", 0b1111, 0b0110), (9, "flip", 0b1, 0), (15, "write", 8, 8))
    assert flipper.strike({"w": live}, plan) == 4
    assert raw(live) == bytes([0x68, 1, 2, 3, 4 ^ 0x10, 5, 6, 7 | 0x80])


def test_strided_views_and_scalars_are_struck_where_they_lie() -> None:
    base = torch.zeros(4, 6)
    live = {"turned": base.t(), "stepped": torch.zeros(10)[::3], "scalar": torch.tensor(1.0)}
    flipper.strike(live, listed("turned", (1, "flip", 1 << 31, 0)))
    assert base[1, 0].item() == 0
    assert torch.signbit(base[1, 0])
    flipper.strike(live, listed("stepped", (3, "write", 0xFFFFFFFF, 0x3F800000)))
    assert live["stepped"].tolist() == [0, 0, 0, 1]
    flipper.strike(live, listed("scalar", (0, "flip", 1 << 31, 0)))
    assert live["scalar"].item() == -1


def test_parameters_of_a_module_are_struck_without_gradients_noticing() -> None:
    model = torch.nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    flipper.strike(model.state_dict(), listed("model.weight", (4, "flip", 1 << 31, 0)))
    flipper.strike(dict(model.named_parameters()), listed("bias", (1, "flip", 1 << 31, 0)))
    assert model.weight[1, 1].item() == -weight[1, 1].item()
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    assert model.weight.grad_fn is None
    model(torch.ones(1, 3)).sum().backward()


def test_tied_names_are_struck_one_after_the_other() -> None:
    """Neither is lost when both lead to one element."""
    shared = torch.zeros(4)
    from flipper.faults.plan import Target, plan_of

    plan = plan_of([Target("a"), Target("b")], [(0, 2, 0, 1, 0), (1, 2, 0, 6, 0)])
    flipper.strike({"a": shared, "b": shared}, plan)
    assert shared.view(torch.int32).tolist() == [0, 0, 7, 0]


def test_expanded_tensors_are_struck_in_the_memory_that_they_repeat() -> None:
    """Every fault counts, also those that meet in one place."""
    from flipper.faults.plan import Target, plan_of

    base = torch.zeros(2, 1)
    plan = plan_of([Target("a")], [(0, 1, 0, 1, 0), (0, 3, 0, 4, 0), (0, 4, 0, 2, 0), (0, 5, 0, 8, 0)])
    flipper.strike({"a": base.expand(2, 3)}, plan)
    assert base.view(torch.int32).tolist() == [[1], [14]]
    number = torch.zeros(())
    flipper.strike({"a": number.expand(6)}, plan)
    assert number.view(torch.int32).item() == 15


def test_a_module_is_refused_with_what_to_give_instead() -> None:
    from flipper.faults.plan import Target, plan_of

    with pytest.raises(UsageError, match="state_dict"):
        flipper.strike(torch.nn.Linear(2, 2), plan_of([Target("weight")], [(0, 0, 0, 1, 0)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [3, np.ones(2, np.float32), "text"])
def test_a_value_that_is_no_tensor_is_refused_where_it_would_be_struck(value: object) -> None:
    live: dict[str, Any] = {"a": torch.ones(2), "b": torch.ones(2)}
    plan = listed("a", (0, "flip", 1, 0))
    flipper.strike({**live, "b": value}, plan)
    with pytest.raises(UsageError, match=f"a is of type {type(value).__name__} here"):
        flipper.strike({**live, "a": value}, plan)


def test_what_does_not_fit_is_refused_before_anything_is_struck() -> None:
    live = {"a": torch.zeros(3), "b": torch.zeros(3)}
    from flipper.faults.plan import Target, plan_of

    for target, row, kind, text in (
        (Target("c"), (1, 0, 0, 1, 0), UsageError, "no live tensor c"),
        (Target("b", "float64"), (1, 0, 0, 1, 0), MismatchError, "float32 here and float64"),
        (Target("b", "float32", (4,)), (1, 0, 0, 1, 0), MismatchError, r"shape \[3\] here"),
        (Target("b"), (1, 3, 0, 1, 0), MismatchError, "3 elements; the plan strikes number 3"),
        (Target("b"), (1, 0, 0, 1 << 32, 0), MismatchError, "bits beyond"),
    ):
        with pytest.raises(kind, match=text):
            flipper.strike(live, plan_of([Target("a"), target], [(0, 0, 0, 1, 0), row]))
    assert not any(tensor.view(torch.int32).any() for tensor in live.values())


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(3, dtype=torch.complex64).conj(), "lazy conjugate"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "lazy conjugate or negative"),
        (torch.zeros(3).to_sparse(), "sparse"),
        (torch.zeros(3, device="meta"), "meta device"),
    ],
)
def test_memory_that_is_not_what_it_seems_is_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(MismatchError, match=text):
        flipper.strike({"w": tensor}, listed("w", (0, "flip", 1, 0)))


def test_an_empty_plan_strikes_nothing() -> None:
    live = {"w": torch.zeros(3)}
    assert flipper.strike(live, listed("w")) == 0
    assert np.array_equal(live["w"].numpy(), np.zeros(3))
