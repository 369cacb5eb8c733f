"""Faults of flipper-draw/1 for one seed, written out: they must never change."""

from __future__ import annotations

import pytest
from files_by_hand import numbers, rows, write_safetensors

import flipper

VALUES = [0.5, -1.25, 3.0, 0.0, -0.001, 100.0, -7.5, 2.0, 1e-8, -1.0, 0.75, 12.0]


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {
        "conv1.weight": numbers(VALUES),
        "conv1.bias": numbers(VALUES[:3]),
        "bn.scale": numbers(VALUES[3:7], "F16"),
        "fc.weight": numbers(VALUES[1:9], "F64"),
    }
    with flipper.open(write_safetensors(tmp_path / "m.safetensors", tensors)) as opened:
        yield opened


KEPT = [
    (
        {"count": 5},
        [
            ("bn.scale", 3, "flip", 0x200, None),
            ("conv1.weight", 4, "flip", 0x20000, None),
            ("fc.weight", 0, "flip", 0x40000000000, None),
            ("fc.weight", 0, "flip", 0x100000000000, None),
            ("fc.weight", 1, "flip", 0x80000000000, None),
        ],
    ),
    (
        {"count": 2, "bits": "exponent-msb,sign"},
        [
            ("conv1.bias", 1, "flip", 0x40000000, None),
            ("conv1.weight", 5, "flip", 0x40000000, None),
        ],
    ),
    (
        {"ber": "0.005"},
        [
            ("bn.scale", 3, "flip", 0x200, None),
            ("fc.weight", 0, "flip", 0x40000000000, None),
        ],
    ),
    (
        {"ber": "0.01", "spread": "per-layer"},
        [
            ("bn.scale", 2, "flip", 0x1000, None),
            ("conv1.weight", 3, "flip", 0x40000000, None),
            ("conv1.weight", 6, "flip", 0x8000000, None),
            ("fc.weight", 2, "flip", 0x80000, None),
            ("fc.weight", 4, "flip", 0x100000000, None),
            ("fc.weight", 7, "flip", 0x1000000000, None),
        ],
    ),
    (
        {"fit": 1000000, "hours": 10000000},
        [
            ("bn.scale", 3, "flip", 0x200, None),
            ("conv1.weight", 4, "flip", 0x20000, None),
            ("conv1.weight", 11, "flip", 0x8000, None),
            ("fc.weight", 0, "flip", 0x40000000000, None),
            ("fc.weight", 0, "flip", 0x100000000000, None),
            ("fc.weight", 1, "flip", 0x80000000000, None),
        ],
    ),
    (
        {"fraction": "0.15"},
        [
            ("conv1.weight", 3, "flip", 0x80000000, None),
            ("conv1.weight", 10, "flip", 0x4000000, None),
            ("fc.weight", 5, "flip", 0x2000000000000, None),
            ("fc.weight", 6, "flip", 0x400000, None),
        ],
    ),
    (
        {"fraction": "0.2", "direction": "1to0"},
        [
            ("conv1.weight", 2, "flip", 0x400000, None),
            ("conv1.weight", 4, "flip", 0x10000, None),
            ("conv1.weight", 10, "flip", 0x4000000, None),
            ("fc.weight", 5, "flip", 0x2000000000000, None),
            ("fc.weight", 6, "flip", 0x4000000000000000, None),
        ],
    ),
    (
        {"count": 1, "spread": "per-layer"},
        [
            ("bn.scale", 2, "flip", 0x1000, None),
            ("conv1.weight", 6, "flip", 0x8000000, None),
            ("fc.weight", 7, "flip", 0x1000000000, None),
        ],
    ),
    (
        {"count": 5, "spread": "layer-uniform"},
        [
            ("bn.scale", 2, "flip", 0x1000, None),
            ("conv1.weight", 3, "flip", 0x40000000, None),
            ("conv1.weight", 6, "flip", 0x8000000, None),
            ("fc.weight", 4, "flip", 0x100000000, None),
            ("fc.weight", 7, "flip", 0x1000000000, None),
        ],
    ),
    (
        {"count": 5, "spread": "tensor-uniform"},
        [
            ("bn.scale", 0, "flip", 0x8000, None),
            ("conv1.bias", 1, "flip", 0x100000, None),
            ("conv1.bias", 2, "flip", 0x1000, None),
            ("conv1.weight", 10, "flip", 0x20000, None),
            ("conv1.weight", 11, "flip", 0x1000, None),
        ],
    ),
    (
        {"count": 5, "spread": "weighted", "weights": {"conv1": "0.3", "fc": 1}},
        [
            ("conv1.weight", 3, "flip", 0x40000000, None),
            ("conv1.weight", 6, "flip", 0x8000000, None),
            ("fc.weight", 2, "flip", 0x80000, None),
            ("fc.weight", 4, "flip", 0x100000000, None),
            ("fc.weight", 7, "flip", 0x1000000000, None),
        ],
    ),
    (
        {"count": 5, "field_weights": {"sign": 1, "exponent": 8, "mantissa": 23}},
        [
            ("conv1.weight", 1, "flip", 0x1, None),
            ("conv1.weight", 3, "flip", 0x8, None),
            ("conv1.weight", 6, "flip", 0x1, None),
            ("fc.weight", 3, "flip", 0x4000000000000000, None),
            ("fc.weight", 5, "flip", 0x4000000000000000, None),
        ],
    ),
    (
        {"count": 5, "field_weights": {"sign": 1, "exponent": 1}, "finite": True},
        [
            ("bn.scale", 3, "flip", 0x8000, None),
            ("conv1.bias", 2, "flip", 0x20000000, None),
            ("conv1.weight", 2, "flip", 0x1000000, None),
            ("fc.weight", 3, "flip", 0x4000000000000000, None),
            ("fc.weight", 5, "flip", 0x4000000000000000, None),
        ],
    ),
    (
        {"count": 3, "field_weights": {"sign": 1, "exponent": 2}, "spread": "layer-uniform"},
        [
            ("bn.scale", 0, "flip", 0x800, None),
            ("conv1.weight", 11, "flip", 0x40000000, None),
            ("fc.weight", 0, "flip", 0x4000000000000000, None),
        ],
    ),
    (
        {"count": 3, "effect": "set1"},
        [
            ("bn.scale", 3, "write", 0x200, 0x200),
            ("conv1.weight", 4, "write", 0x20000, 0x20000),
            ("fc.weight", 0, "write", 0x40000000000, 0x40000000000),
        ],
    ),
    (
        {"count": 3, "effect": "random"},
        [
            ("conv1.weight", 3, "write", 0xffffffff, 0x90432c24),
            ("fc.weight", 5, "write", 0xffffffffffffffff, 0x6c4e8fc64a921a6f),
            ("fc.weight", 6, "write", 0xffffffffffffffff, 0xe87294e7ca042f18),
        ],
    ),
    (
        {"count": 2, "effect": "flip:0x8001"},
        [
            ("fc.weight", 5, "flip", 0x8001, None),
            ("fc.weight", 6, "flip", 0x8001, None),
        ],
    ),
    (
        {"count": 3, "effect": "scale:-1.5"},
        [
            ("conv1.weight", 3, "write", 0xffffffff, 0x80000000),
            ("fc.weight", 5, "write", 0xffffffffffffffff, 0x4026800000000000),
            ("fc.weight", 6, "write", 0xffffffffffffffff, 0xc008000000000000),
        ],
    ),
    (
        {"count": 4, "burst": 3},
        [
            ("conv1.bias", 0, "flip", 0xe, None),
            ("conv1.weight", 4, "flip", 0x1c000, None),
            ("conv1.weight", 5, "flip", 0xe00, None),
            ("fc.weight", 1, "flip", 0x1c0000, None),
        ],
    ),
    (
        {"ber": "0.004", "burst": 2},
        [
            ("bn.scale", 3, "flip", 0x3000, None),
        ],
    ),
    (
        {"count": 4, "finite": True, "bits": "exponent"},
        [
            ("conv1.bias", 0, "flip", 0x8000000, None),
            ("conv1.weight", 0, "flip", 0x10000000, None),
            ("conv1.weight", 1, "flip", 0x10000000, None),
            ("conv1.weight", 3, "flip", 0x20000000, None),
        ],
    ),
    (
        {"count": 4, "max_abs": 1},
        [
            ("bn.scale", 1, "flip", 0x40, None),
            ("conv1.weight", 4, "flip", 0x20000, None),
            ("conv1.weight", 8, "flip", 0x4, None),
            ("fc.weight", 7, "flip", 0x20000000000, None),
        ],
    ),
    (
        {"count": 4, "direction": "1to0", "bits": "exponent-msb"},
        [
            ("conv1.weight", 2, "flip", 0x40000000, None),
            ("conv1.weight", 5, "flip", 0x40000000, None),
            ("fc.weight", 5, "flip", 0x4000000000000000, None),
            ("fc.weight", 6, "flip", 0x4000000000000000, None),
        ],
    ),
    (
        {"ber": "0.01", "finite": True},
        [
            ("bn.scale", 3, "flip", 0x200, None),
            ("conv1.weight", 4, "flip", 0x20000, None),
            ("conv1.weight", 11, "flip", 0x8000, None),
            ("fc.weight", 0, "flip", 0x40000000000, None),
            ("fc.weight", 1, "flip", 0x80000000000, None),
        ],
    ),
    (
        {"count": 27, "bits": "sign", "layers": ["conv1", "bn", "fc"], "effect": "set0", "spread": "tensor-uniform"},
        [
            ("bn.scale", 0, "write", 0x8000, 0x0),
            ("bn.scale", 1, "write", 0x8000, 0x0),
            ("bn.scale", 2, "write", 0x8000, 0x0),
            ("bn.scale", 3, "write", 0x8000, 0x0),
            ("conv1.bias", 0, "write", 0x80000000, 0x0),
            ("conv1.bias", 1, "write", 0x80000000, 0x0),
            ("conv1.bias", 2, "write", 0x80000000, 0x0),
            ("conv1.weight", 0, "write", 0x80000000, 0x0),
            ("conv1.weight", 1, "write", 0x80000000, 0x0),
            ("conv1.weight", 2, "write", 0x80000000, 0x0),
            ("conv1.weight", 3, "write", 0x80000000, 0x0),
            ("conv1.weight", 4, "write", 0x80000000, 0x0),
            ("conv1.weight", 5, "write", 0x80000000, 0x0),
            ("conv1.weight", 6, "write", 0x80000000, 0x0),
            ("conv1.weight", 7, "write", 0x80000000, 0x0),
            ("conv1.weight", 8, "write", 0x80000000, 0x0),
            ("conv1.weight", 9, "write", 0x80000000, 0x0),
            ("conv1.weight", 10, "write", 0x80000000, 0x0),
            ("conv1.weight", 11, "write", 0x80000000, 0x0),
            ("fc.weight", 0, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 1, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 2, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 3, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 4, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 5, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 6, "write", 0x8000000000000000, 0x0),
            ("fc.weight", 7, "write", 0x8000000000000000, 0x0),
        ],
    ),
]


@pytest.mark.parametrize(("options", "faults"), KEPT, ids=[str(options) for options, _ in KEPT])
def test_these_are_the_faults_of_seed_2026(checkpoint, options, faults):
    plan = flipper.draw(checkpoint, flipper.FaultModel(**options), seed=2026)
    assert rows(plan) == faults
