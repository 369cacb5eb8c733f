"""Buckets: every parameter is in one, last ones first, and small models have several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flipper.errors import UsageError
from flipper.failstop.buckets import MOST_BYTES, bucketed, check_bucketwise
from flipper.training import recipes

SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=30)


@given(SIZES, st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=30, max_size=30))
def test_all_parameters_are_in_buckets_in_reverse_order(sizes: list[int], dtypes: list[torch.dtype]) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in zip(sizes, dtypes, strict=False)]
    buckets = bucketed(parameters)
    assert [id(each) for bucket in buckets for each in bucket] == [id(each) for each in parameters[::-1]]
    assert all(len({each.dtype for each in bucket}) == 1 for bucket in buckets)


def test_what_is_not_trained_is_in_none() -> None:
    fixed, trained = nn.Parameter(torch.zeros(3), requires_grad=False), nn.Parameter(torch.zeros(3))
    assert [len(bucket) for bucket in bucketed([fixed, trained])] == [1]


def test_a_large_model_has_buckets_as_large_as_those_of_ddp() -> None:
    parameters = [nn.Parameter(torch.empty(1 << 20, device="meta")) for _ in range(64)]  # 4 MiB each
    sizes = [sum(each.nbytes for each in bucket) for bucket in bucketed(parameters)]
    assert sum(sizes) == 256 << 20
    assert max(sizes) <= MOST_BYTES


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "mnist5k-cnn", "modadd-transformer"])
def test_small_recipes_have_three_or_more(name: str) -> None:
    assert len(bucketed(recipes.get(name).model().parameters())) >= 3


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Renamed(torch.optim.Adam):
    """Steps as Adam does."""


class Lion(torch.optim.Optimizer):
    """One of a user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def test_what_looks_at_all_gradients_is_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    hooked = torch.optim.Adam(parameters)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="optimizer has hooks of its step, as for gradient clipping"):
        check_bucketwise(hooked)
    with pytest.raises(UsageError, match="is a Clipping with a step of its own, as for gradient clipping"):
        check_bucketwise(Clipping(parameters))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, Renamed, Lion])
def test_what_takes_each_parameter_by_itself_is_not(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # puts a step of its own around that of the instance
    check_bucketwise(optimizer)
