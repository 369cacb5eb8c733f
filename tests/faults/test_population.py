"""The population: every byte that a selected tensor sees once, whatever views share it; its size by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from files_by_hand import write_safetensors, zeros
from hypothesis import given, settings
from hypothesis import strategies as st

import flipper
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.tensor import Extent, Tensor
from flipper.errors import CheckpointError, NothingEligible, UsageError
from flipper.faults import overlap
from flipper.faults.draw import population_of
from flipper.faults.overlap import distinct_elements

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "int8": 1}


def struck_everywhere(checkpoint, **options):
    """Tensor, element and bit of a draw of every eligible bit."""
    plan = flipper.draw(checkpoint, flipper.FaultModel(ber=1, **options), seed=1)
    return [(fault.tensor, fault.flat, fault.bits[0]) for fault in plan]


def bytes_by_torch(tensors):
    """(storage, byte) of everything that the tensors see."""
    seen = set()
    for tensor in tensors:
        size, storage = tensor.element_size(), tensor.untyped_storage().data_ptr()
        for index in np.ndindex(*tensor.shape):
            start = (tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))) * size
            seen.update((storage, start + byte) for byte in range(size))
    return seen


BASE = torch.arange(48, dtype=torch.float32)
VIEWS = {
    "nothing shared": {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64)},
    "a part, the whole first": {"a": BASE, "b": BASE[10:20]},
    "a part, the part first": {"a": BASE[10:20], "b": BASE},
    "parts that overlap": {"a": BASE[0:20], "b": BASE[10:30], "c": BASE[25:27], "d": BASE[40:]},
    "parts side by side, then all": {"a": BASE[0:10], "b": BASE[20:30], "c": BASE[10:20], "d": BASE},
    "columns": {"a": BASE.view(6, 8)[:, 2:4], "b": BASE.view(6, 8)[1:3]},
    "every other": {"a": BASE[::2], "b": BASE[::3], "c": BASE[:7]},
    "transposed": {"a": BASE.view(6, 8).T, "b": BASE[5:9]},
    "transposed later": {"a": BASE[5:9], "b": BASE.view(6, 8).T},
    "expanded": {"a": BASE[3:6].expand(5, 3), "b": BASE[4:9].unsqueeze(1).expand(5, 2)},
    "sliding windows": {"a": BASE[:12].unfold(0, 4, 1), "b": BASE[10:14]},
    "dead storage": {"a": BASE[8:12], "b": BASE[30:33].clone()},
    "complex numbers": {"a": torch.ones(6, dtype=torch.complex64)[1:4], "b": torch.ones(2, dtype=torch.complex64)},
    "tied": {"a": BASE[:8], "b": BASE[:8], "c": BASE[:8].view(2, 4)},
    "empty and scalar": {"a": torch.ones(0), "b": torch.tensor(1.0), "c": BASE[3]},
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_every_byte_that_is_seen_can_be_struck_once_and_no_other(tmp_path, views):
    torch.save(views, tmp_path / "m.pt")
    kinds = ["float32", "float64", "int16", "complex64"]
    with flipper.open(tmp_path / "m.pt") as checkpoint:
        struck = struck_everywhere(checkpoint, dtypes=kinds)
        record = population_of(checkpoint, flipper.FaultModel(dtypes=kinds)).record()
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    loaded = torch.load(tmp_path / "m.pt")
    visible = bytes_by_torch(loaded.values())
    assert record["bits"] == len(struck) == 8 * len(visible)
    places = set()
    for name, flat, bit in struck:
        view = loaded[name]
        if view.is_complex():
            view = torch.view_as_real(view)
        index = np.unravel_index(flat, tensors[name].dims) if view.dim() else ()
        element = view.storage_offset() + sum(int(i) * s for i, s in zip(index, view.stride(), strict=True))
        places.add((view.untyped_storage().data_ptr(), element * view.element_size() + bit // 8, bit % 8))
    assert len(places) == len(struck)
    assert {place[:2] for place in places} == visible


def test_views_of_equal_width_share_by_name(tmp_path):
    torch.save({"b": BASE, "a": BASE[10:12]}, tmp_path / "m.pt")
    with flipper.open(tmp_path / "m.pt") as checkpoint:
        segments = population_of(checkpoint, flipper.FaultModel()).segments
    assert {segment.tensor.name: segment.elements for segment in segments} == {"a": 2, "b": 46}


def test_a_view_that_is_not_selected_takes_nothing(tmp_path):
    torch.save({"a": BASE, "b": BASE[10:12]}, tmp_path / "m.pt")
    with flipper.open(tmp_path / "m.pt") as checkpoint:
        assert len(struck_everywhere(checkpoint, layers=["b"])) == 2 * 32
        assert len(struck_everywhere(checkpoint, exclude=["a"])) == 2 * 32


def test_a_view_without_eligible_bits_takes_nothing(tmp_path):
    views = [Tensor("a", "uint64", (4,), Extent("", 0)), Tensor("b", "float16", (16,), Extent("", 0))]
    with Checkpoint(tmp_path, {}, views) as checkpoint:
        assert len(struck_everywhere(checkpoint, dtypes=["uint64", "float16"], bits="sign")) == 16


@st.composite
def clusters(draw):
    """Views of any dtype, sizes and strides over one file, aligned to their width."""
    tensors = []
    for index in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        strides = draw(st.none() | st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)).map(tuple))
        start = WIDTHS[dtype] * draw(st.integers(0, 20))
        tensors.append(Tensor(f"t{index}", dtype, shape, Extent("", start, "little", strides)))
    return tensors


def touched(tensor, flat):
    strides = tensor.place.strides
    if strides is None:
        strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    index = np.unravel_index(flat, tensor.shape) if tensor.shape else ()
    step = sum(int(i) * stride for i, stride in zip(index, strides, strict=True))
    start = tensor.place.start + step * WIDTHS[tensor.dtype]
    return range(start, start + WIDTHS[tensor.dtype])


@pytest.mark.parametrize("block", [1, 7, 1 << 18])
@settings(max_examples=150)
@given(tensors=clusters())
def test_shares_are_those_of_byte_after_byte(block, tensors):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "BLOCK", block)
        patch.setattr(overlap, "SELF_OVERLAP_LIMIT", 10**6)
        shares = distinct_elements(tensors)
    taken: set[int] = set()
    for tensor in sorted(tensors, key=lambda tensor: (-WIDTHS[tensor.dtype], tensor.name)):
        mine = []
        for flat in range(tensor.elements):
            if not taken & set(touched(tensor, flat)):
                taken.update(touched(tensor, flat))
                mine.append(flat)
        own = shares.get(tensor.name)
        assert (list(range(tensor.elements)) if own is None else own.tolist()) == mine
    assert taken == {byte for tensor in tensors for flat in range(tensor.elements) for byte in touched(tensor, flat)}


def test_elements_of_a_packed_dtype_that_share_a_byte_all_count():
    half = Tensor("a", "float4_e2m1fn", (7,), Extent("", 0))
    whole = Tensor("b", "float4_e2m1fn", (9,), Extent("", 0))
    crossing = Tensor("c", "float6_e2m3fn", (8,), Extent("", 3))
    shares = distinct_elements([half, whole, crossing])
    assert "c" not in shares  # the widest, whole
    assert shares["a"].tolist() == [0, 1, 2, 3, 4, 5]  # the seventh lies in byte 3
    assert shares["b"].tolist() == []


def test_a_view_that_names_its_bytes_too_often_is_refused_and_says_how_to_go_on():
    view = Tensor("a", "float32", (1000, 1000), Extent("", 0, "little", (1, 1)))
    with pytest.raises(CheckpointError, match="the view a overlaps itself too often; leave it out by --exclude"):
        distinct_elements([view])


def test_thousands_of_views_of_one_buffer_are_shared_out_at_once():
    views = [Tensor(f"a{index:05}", "float32", (100,), Extent("", 400 * index)) for index in range(20_000)]
    whole = Tensor("b", "float32", (2_000_100,), Extent("", 0))
    assert distinct_elements([*views, whole])["b"].tolist() == list(range(2_000_000, 2_000_100))


def test_sizes_are_told_by_role_and_positions_by_dtype(tmp_path):
    tensors = {
        "model.a.weight": zeros("F32", 3, 2),
        "model.a.running_mean": zeros("F64", 2),
        "optimizer.a.weight.exp_avg": zeros("F16", 5),
        "none": zeros("F32", 0),
        "whole": zeros("I8", 100),
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    with flipper.open(path) as checkpoint:
        def record(**options):
            return population_of(checkpoint, flipper.FaultModel(**options)).record()

        by_role = {"buffer": 128, "optimizer": 80, "parameter": 192}
        assert record() == {"tensors": 3, "elements": 13, "bits": 400, "bits_by_role": by_role}
        by_role = {"buffer": 2 * 11, "optimizer": 5 * 5, "parameter": 6 * 8}
        assert record(bits="exponent") == {"tensors": 3, "elements": 13, "bits": 95, "bits_by_role": by_role}
        assert record(bits="sign", dtypes=["int8", "float16"])["bits"] == 105
        assert record(bits="exponent", dtypes=["int8"]) == {"tensors": 0, "elements": 0, "bits": 0, "bits_by_role": {}}
        assert record(effect="flip:0x8001")["bits"] == 13 * 2
        assert record(effect="scale:2")["bits"] == 400


def test_positions_that_a_selected_dtype_lacks_are_an_error_naming_the_tensors(tmp_path):
    tensors = {name: zeros(tag, 2) for name, tag in (("a", "F32"), ("b", "F16"), ("c", "BF16"), ("d", "I8"))}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    with flipper.open(path) as checkpoint:
        for options in ({"bits": "30"}, {"bits": "sign,14-17"}, {"effect": "flip:0x10000"}):
            with pytest.raises(UsageError, match=r"don't exist in b, c; .*--exclude or --dtype") as caught:
                flipper.draw(checkpoint, flipper.FaultModel(**options), seed=1)
            assert caught.value.exit_code == 2
        assert len(struck_everywhere(checkpoint, bits="30", layers=["a"])) == 2
        assert len(struck_everywhere(checkpoint, bits="exponent", exclude=["a"])) == 2 * 5 + 2 * 8


def test_nothing_eligible_is_wrong_usage_even_for_no_faults(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": zeros("I8", 2), "b": zeros("F32", 0)})
    with flipper.open(path) as checkpoint:
        for options in ({}, {"count": 0}, {"ber": 0}, {"dtypes": ["int8"], "bits": "exponent"}):
            with pytest.raises(NothingEligible) as caught:
                flipper.draw(checkpoint, flipper.FaultModel(**options), seed=1)
            assert caught.value.exit_code == 2
        with pytest.raises(NothingEligible, match="9 neighbouring eligible bits for --burst 9"):
            flipper.draw(checkpoint, flipper.FaultModel(dtypes=["int8"], burst=9), seed=1)


def test_more_places_than_can_be_numbered_are_refused(tmp_path):
    huge = Tensor("a", "float32", (1 << 60,), Extent("", 0))
    with pytest.raises(UsageError, match="select less"):
        flipper.draw(Checkpoint(tmp_path, {}, [huge]), flipper.FaultModel(), seed=1)
