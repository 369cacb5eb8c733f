"""The transformers: the table they learn, their size and causality, heads on fewer columns, their first losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import first_losses, parameter_count

from flipper.training import recipes

NAMES = ["modadd-transformer", "modadd-transformer-large"]


@pytest.mark.parametrize(("name", "prime"), [(NAMES[0], 47), (NAMES[1], 97)])
def test_the_data_is_the_whole_table_once_a_fifth_of_it_held_out(name: str, prime: int) -> None:
    data = recipes.get(name).data(None)
    assert (data.train_features.dtype, data.train_targets.dtype) == (torch.int64, torch.int64)
    assert len(data.test_targets) == prime**2 // 5
    pairs = torch.cat([data.train_features, data.test_features]).tolist()
    sums = torch.cat([data.train_targets, data.test_targets]).tolist()
    assert sorted(pairs) == [[a, b, prime] for a in range(prime) for b in range(prime)]
    assert sums == [(a + b) % prime for a, b, _ in pairs]


def test_what_is_held_out_never_changes() -> None:
    """Else a resumed run would be tested on what it was trained on."""
    assert recipes.get(NAMES[0]).data(None).test_features[:3].tolist() == [[2, 12, 47], [12, 20, 47], [46, 5, 47]]


@pytest.mark.parametrize(("name", "tokens", "width"), [(NAMES[0], 47, 64), (NAMES[1], 97, 128)])
def test_the_model_is_of_the_size_that_its_shape_gives(name: str, tokens: int, width: int) -> None:
    """Two blocks of 12 width^2 weights, 9 width biases and 4 width for LayerNorm; embeddings; head."""
    block = 12 * width**2 + 13 * width
    ends = (tokens + 1 + 3) * width + 2 * width + (width + 1) * tokens
    recipe = recipes.get(name)
    assert parameter_count(recipe) == 2 * block + ends
    assert recipe.model()(torch.zeros(5, 3, dtype=torch.int64)).shape == (5, tokens)


def test_a_place_sees_only_what_comes_before_it() -> None:
    block = recipes.get(NAMES[0]).model().get_submodule("block1")
    x = torch.rand(1, 3, 64)
    changed = x.clone()
    changed[0, 2] += 1
    assert torch.equal(block(x)[0, :2], block(changed)[0, :2])
    assert not torch.equal(block(x)[0, 2], block(changed)[0, 2])


def test_attention_is_the_textbook_formula_with_heads_of_16() -> None:
    torch.manual_seed(0)
    attention: Any = recipes.get(NAMES[0]).model().get_submodule("block1.attention")
    x = torch.rand(2, 3, 64)
    q, k, v = attention.q(x), attention.k(x), attention.v(x)
    heads = []
    for head in range(4):
        part = slice(16 * head, 16 * head + 16)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / 4
        scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, dim=-1)))


def test_half_of_the_columns_are_half_of_the_heads() -> None:
    """So that each rank of a tensor-parallel pair computes its own, and the rows of `out` add up."""
    attention: Any = recipes.get(NAMES[0]).model().get_submodule("block1.attention")
    x = torch.rand(2, 3, 64)
    whole = attention(x) - attention.out.bias
    halves = []
    for half in (slice(0, 32), slice(32, 64)):
        part: Any = type(attention)(64)
        for name in "qkv":
            linear, full = getattr(part, name), getattr(attention, name)
            linear.weight.data, linear.bias.data = full.weight.data[half], full.bias.data[half]
        part.out.weight.data, part.out.bias.data = attention.out.weight.data[:, half], torch.zeros(64)
        halves.append(part(x))
    torch.testing.assert_close(halves[0] + halves[1], whole)


FIRST = {
    NAMES[0]: [3.92329, 3.91818, 3.97839, 4.00783, 3.95836],
    NAMES[1]: [4.66014, 4.66584, 4.68688, 4.72711, 4.71438],
}


@pytest.mark.parametrize("name", NAMES)
def test_first_losses(name: str) -> None:
    assert first_losses(recipes.get(name), 5) == pytest.approx(FIRST[name], rel=1e-3)
