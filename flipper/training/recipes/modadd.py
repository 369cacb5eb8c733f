"""Decoder-only transformers that learn addition modulo a prime from a part of its table."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from flipper.training.recipes.recipe import Data, Recipe, accuracy
from flipper.training.recipes.schedules import cosine

HEAD_WIDTH: Final = 16
LENGTH: Final = 3  # a, b, =


@functools.cache
def table(prime: int, folder: Path | None = None) -> Data:
    """All sums a + b modulo a prime: features (n, 3) int64 are a, b and the sign =, whose number is the prime.

    A fifth of the pairs is held out: those first in the order of the sha256 of "a+b".
    """
    del folder  # computed
    pairs = [(a, b) for a in range(prime) for b in range(prime)]
    pairs.sort(key=lambda pair: hashlib.sha256(b"%d+%d" % pair).digest())
    features = torch.tensor([(a, b, prime) for a, b in pairs])
    targets = features[:, :2].sum(dim=1) % prime
    held_out = len(pairs) // 5
    return Data(features[held_out:], targets[held_out:], features[:held_out], targets[:held_out])


class Embedding(nn.Module):
    """Tokens (n, length) int64 to vectors (n, length, width): a learned one for the token plus one for its place."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.place(places)
        return embedded


class Attention(nn.Module):
    """Causal self-attention with heads of HEAD_WIDTH.

    The number of heads is the projections' output width over HEAD_WIDTH: fewer on each rank of a tensor-parallel
    group, which holds some columns of q, k and v and the same rows of out.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projected.view(*x.shape[:2], -1, HEAD_WIDTH).transpose(1, 2)
            for projected in (self.q(x), self.k(x), self.v(x))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention, then a perceptron four times as wide, each behind a LayerNorm and added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class Head(nn.Module):
    """The scores (n, tokens) of what follows the last place."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.norm(x[:, -1]))
        return scores


def transformer(prime: int, width: int) -> nn.Sequential:
    """Embedding, two blocks, head: 106,415 parameters for (47, 64), 422,241 for (97, 128)."""
    return nn.Sequential(
        OrderedDict(
            embedding=Embedding(prime + 1, width), block1=Block(width), block2=Block(width), head=Head(width, prime)
        )
    )


# Where a pipeline may cut: before each child but the first.
CUTS: Final = ("block1", "block2", "head")


def tensor_plan() -> dict[str, ParallelStyle]:
    """Each rank takes some of the heads and some of the perceptron's hidden units."""
    plan: dict[str, ParallelStyle] = {}
    for block in ("block1", "block2"):
        plan |= {f"{block}.{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in ("attention.out", "down")}
    return plan


def adamw(lr: float, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with the strong weight decay that makes the table generalise (A. Power et al., Grokking, 2022).

    The second beta is low: with 0.98 the accuracy sometimes broke down for a while after it had reached 1.
    """
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=1.0)


SMALL = Recipe(
    "modadd-transformer", functools.partial(transformer, 47, 64), functools.partial(table, 47),
    nn.functional.cross_entropy, accuracy, functools.partial(adamw, 0.003), 128,
    cuts=CUTS, schedule=cosine(108 * 13, warm_up=50), tensor_plan=tensor_plan(), epochs=108,
)  # fmt: skip
LARGE = Recipe(
    "modadd-transformer-large", functools.partial(transformer, 97, 128), functools.partial(table, 97),
    nn.functional.cross_entropy, accuracy, functools.partial(adamw, 0.001), 128,
    cuts=CUTS, schedule=cosine(45 * 58, warm_up=100), tensor_plan=tensor_plan(), epochs=45,
)  # fmt: skip
