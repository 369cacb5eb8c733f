"""Plans from files: each spelling means the same faults; sequences of hdf5_corrupter; what is refused, and where."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from files_by_hand import rows, write_safetensors, zeros
from hypothesis import given, settings
from hypothesis import strategies as st

import flipper
from flipper.errors import FlipperError, MismatchError, UsageError
from flipper.faults.plan_file import read_plan

FAULTS = [("a/w", 1, "flip", 0b11, None), ("a/w", 5, "write", 0xFF, 0x0F), ("b", 0, "flip", 1 << 31, None)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tensors = {"a/w": zeros("F32", 2, 3), "b": zeros("F32"), "h": zeros("F16", 4), "i": zeros("I8", 2)}
    path = write_safetensors(tmp_path_factory.mktemp("plan") / "m.safetensors", tensors)
    with flipper.open(path) as opened:
        yield opened


def read(checkpoint, text):
    return rows(read_plan(Path("plan"), checkpoint, io.StringIO(text)))


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def record(tensor, flat, op, mask, value):
    return {"tensor": tensor, "flat": flat, "op": op, "mask": hex(mask), "value": None if value is None else hex(value)}


def test_json_lines_arrays_and_csv_are_alike(checkpoint):
    records = [record(*fault) for fault in FAULTS]
    table = "tensor,flat,op,mask,value\n" + "".join(",".join(map(str, r.values())) + "\n" for r in records)
    for text in (lines(*records), json.dumps(records, indent=2), table.replace("None", ""), lines(*records[::-1])):
        assert read(checkpoint, text) == FAULTS
        assert read(checkpoint, "\ufeff" + text) == FAULTS


def test_objects_over_several_lines_are_taken_as_jq_prints_them(checkpoint):
    """jq's own layout, and with options of its that leave no line between objects."""
    records = [record(*fault) for fault in FAULTS]
    for end in ("\n", "\n\n", "", " "):
        assert read(checkpoint, end.join(json.dumps(r, indent=2) for r in records) + end) == FAULTS
        assert read(checkpoint, end.join(map(json.dumps, records)) + end) == FAULTS
    broken = "\n".join(json.dumps({"tensor": "b", "flat": flat, "bits": [0]}, indent=0) for flat in (0, 0.5))
    for text in (broken, broken.replace("0.5", "")):
        with pytest.raises(UsageError, match="line 8: "):
            read(checkpoint, text)


def test_bits_are_named_by_position(checkpoint):
    for text in (
        lines({"tensor": "b", "flat": 0, "bits": [31, 0]}),
        json.dumps({"tensor": "b", "flat": 0, "bits": [31, 0]}, indent=1),
        "tensor,flat,bits\nb,0,31 0\n",
        'bits,tensor,flat\n"[31, 0]",b,0\n',
    ):
        assert read(checkpoint, text) == [("b", 0, "flip", 1 << 31 | 1, None)]


def test_an_empty_file_is_a_plan_without_faults(checkpoint):
    for text in ("", "\n \n", "[]"):
        assert read(checkpoint, text) == []


def test_a_manifests_rows_are_a_plan(checkpoint):
    row = {**record("b", 0, "flip", 1, None), "aliases": [], "index": [], "bits": [0], "before_value": "NaN"}
    assert read(checkpoint, lines(row)) == [("b", 0, "flip", 1, None)]


def test_positions_of_hdf5_corrupter_count_from_the_most_significant(checkpoint):
    """Its entries are [indexes, bits]; null bits are attempts that it didn't make; a burst may come back to a bit."""
    sequence = {
        "/a/w": [[[1, 2], 0], [[0, 0], [1, 2]], [[1, 1], None], [[0, 1], [3, 4, 3]]],
        "b": [[[0], 31]],
        "h/": [[[3], 0]],
        "i": [],
    }
    assert read(checkpoint, json.dumps(sequence)) == [
        ("a/w", 0, "flip", 1 << 30 | 1 << 29, None),
        ("a/w", 1, "flip", 1 << 27, None),
        ("a/w", 5, "flip", 1 << 31, None),
        ("b", 0, "flip", 1, None),
        ("h", 3, "flip", 1 << 15, None),
    ]


@pytest.mark.parametrize(
    ("sequence", "error", "message"),
    [
        ({"a/w": [[[], 3]]}, UsageError, "no indexes, so no place to strike"),
        ({"x": [[[0], 3]]}, UsageError, "no tensor 'x'"),
        ({"a/w": 3}, UsageError, "no list"),
        ({"a/w": [[[0, 0]]]}, UsageError, "entry 0 is not"),
        ({"a/w": [[[0], 3]]}, MismatchError, r"the shape is \[2, 3\]"),
        ({"a/w": [[[0, 3], 3]]}, MismatchError, "the shape is"),
        ({"a/w": [[[0, -1], 3]]}, MismatchError, "the shape is"),
        ({"a/w": [[[0, 0], 32]]}, MismatchError, "names bit 32; float32 has 32"),
        ({"h": [[[0], 16]]}, MismatchError, "float16 has 16"),
        ({"h": [[[0], "x"]]}, MismatchError, "names bit x"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(checkpoint, sequence, error, message):
    with pytest.raises(error, match=message):
        read(checkpoint, json.dumps(sequence))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"flat": 0, "bits": [0]}, "'tensor' is missing"),
        ({"tensor": "b", "bits": [0]}, "'flat' is missing"),
        ({"tensor": "b", "flat": 0}, "'bits' is missing"),
        ({"tensor": 1, "flat": 0, "bits": [0]}, "not a name"),
        ({"tensor": "b", "flat": -1, "bits": [0]}, "-1 is not between"),
        ({"tensor": "b", "flat": 2**63, "bits": [0]}, "beyond every tensor"),
        ({"tensor": "b", "flat": True, "bits": [0]}, "not a whole number"),
        ({"tensor": "b", "flat": 0.0, "bits": [0]}, "not a whole number"),
        ({"tensor": "b", "flat": 0, "bits": [64]}, "from 0 to 63"),
        ({"tensor": "b", "flat": 0, "bits": [3, 3]}, "named twice"),
        ({"tensor": "b", "flat": 0, "op": "xor", "mask": 1}, "none of flip, write"),
        ({"tensor": "b", "flat": 0, "op": "flip"}, "'mask' is missing"),
        ({"tensor": "b", "flat": 0, "op": "flip", "mask": "0x1_0"}, "not a whole number"),
        ({"tensor": "b", "flat": 0, "op": "write", "mask": 1}, "'value' is missing"),
        ({"tensor": "b", "flat": 0, "op": "flip", "mask": 2**64}, "between 0 and"),
        (3, "not an object"),
    ],
)
def test_a_row_that_is_none_is_refused_by_its_number(checkpoint, row, message):
    with pytest.raises(UsageError, match="line 2: .*" + message) as caught:
        read(checkpoint, lines({"tensor": "b", "flat": 0, "bits": [0]}, row))
    assert caught.value.exit_code == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["a/w", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["tensor", "flat", "bits", "op", "mask", "value", "a/w", "b", "schema"]), inner, max_size=5),
)  # fmt: skip


@settings(max_examples=300)
@given(text=st.one_of(JSON.map(json.dumps), st.lists(JSON.map(json.dumps), max_size=3).map("\n".join), st.text()))
def test_nothing_but_flippers_errors_comes_out(checkpoint, text):
    try:
        plan = read_plan(Path("plan"), checkpoint, io.StringIO(text))
    except FlipperError:
        return
    assert plan.flat.dtype == np.int64
    assert len(list(plan)) == len(plan)
