"""The structure record: what is encoded comes back, value by value and type by type."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flipper.checkpoints.structure import MAX_DEPTH, decode, encode, walk
from flipper.checkpoints.tree import Leaf, Opaque
from flipper.errors import CheckpointError, UsageError

text = st.text(st.characters(exclude_categories=()))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary()
)
leaves = st.builds(Leaf, text, st.booleans()) | st.builds(Opaque, text)
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary()
trees = st.recursive(
    scalars | leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys | st.tuples(keys, keys), inner, max_size=4)
    ),
    max_leaves=20,
)


def identity(node):
    """A form that is equal only for trees that are equal to the last bit, order and type included."""
    if isinstance(node, float):
        return ("float", struct.pack("<d", node))
    if isinstance(node, complex):
        return ("complex", struct.pack("<dd", node.real, node.imag))
    if isinstance(node, dict):
        return ("dict", [(identity(key), identity(value)) for key, value in node.items()])
    if isinstance(node, (list, tuple)):
        return (type(node).__name__, [identity(item) for item in node])
    return (type(node).__name__, node)


@settings(max_examples=400)
@given(trees)
def test_every_tree_comes_back_equal_in_value_type_and_order(tree):
    record = encode(tree)
    assert identity(decode(record)) == identity(tree)


@given(trees)
def test_a_record_is_one_line_of_ascii_json(tree):
    record = encode(tree)
    assert record.isascii()
    assert "\n" not in record
    json.loads(record, parse_constant=pytest.fail)


@pytest.mark.parametrize("pattern", [0x7FF8000000000001, 0xFFF0000000000000, 0x7FF0000000000000, 0x7FF4000000000000])
def test_nan_payloads_and_infinities_keep_their_bits(pattern):
    (value,) = struct.unpack("<d", struct.pack("<Q", pattern))
    assert struct.pack("<d", decode(encode(value))) == struct.pack("<d", value)


def test_a_record_is_readable_by_eye():
    tree = {"model": {"fc.weight": Leaf("model.fc.weight", parameter=True)}, "epoch": 3, "betas": (0.9, 0.999)}
    assert encode(tree) == (
        '{"dict":{"model":{"dict":{"fc.weight":{"parameter":"model.fc.weight"}}},'
        '"epoch":3,"betas":{"tuple":[0.9,0.999]}}}'
    )


def test_neighbouring_lone_surrogates_do_not_merge():
    tree = {"\ud83d\ude00": "\ud83d\ude00"}
    assert decode(encode(tree)) == tree
    assert len(decode(encode("\ud83d\ude00"))) == 2


def test_walk_goes_in_the_order_of_the_tree():
    tree = {"b": [1, {"x": 2}], 0: (3,), "a": {}}
    assert list(walk(tree)) == [(("b", 0), 1), (("b", 1, "x"), 2), ((0, 0), 3)]


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH])
@pytest.mark.parametrize("wrap", [lambda tree: [tree], lambda tree: (tree,), lambda tree: {0: tree, "k": None}])
def test_the_deepest_legal_tree_comes_back(depth, wrap):
    tree = Leaf("x")
    for _ in range(depth):
        tree = wrap(tree)
    assert decode(encode(tree)) == tree


def test_a_deeper_tree_is_refused():
    tree = []
    for _ in range(MAX_DEPTH + 2):
        tree = [tree, 1]
    with pytest.raises(CheckpointError) as caught:
        encode(tree)
    assert caught.value.reason == "pickle-too-deep"


def test_a_tree_that_holds_itself_is_refused():
    tree = [1]
    tree.append(tree)
    with pytest.raises(CheckpointError) as caught:
        encode(tree)
    assert caught.value.reason == "pickle-too-deep"


def test_shared_lists_that_multiply_are_refused_in_bounded_time(monkeypatch):
    monkeypatch.setattr("flipper.checkpoints.structure.MAX_NODES", 10_000)
    tree = [0] * 10
    for _ in range(30):
        tree = [tree] * 10
    with pytest.raises(CheckpointError) as caught:
        encode(tree)
    assert caught.value.reason == "pickle-too-big"


@pytest.mark.parametrize("value", [{1, 2}, object(), bytearray(b"x"), range(3)])
def test_foreign_values_are_refused_by_name(value):
    with pytest.raises(UsageError, match=type(value).__name__):
        encode({"here": value})


@pytest.mark.parametrize(
    "record",
    [
        "", "{", "[1,", "{}", '{"dict":1}', '{"dict":[]}', '{"pairs":[[1]]}', '{"pairs":[[{"pairs":[]},1]]}',
        '{"tuple":1}', '{"complex":[1]}', '{"complex":["a",1]}', '{"bytes":"?"}', '{"bytes":1}', '{"float":"00"}',
        '{"float":1}', '{"int":"x"}', '{"int":[]}', '{"str":"ff"}', '{"str":5}', '{"tensor":1}', '{"opaque":null}',
        '{"surprise":1}', '{"dict":{},"tuple":[]}', "[" * 100_000, '{"tuple":[' * 5_000, "9" * 5_000,
    ],
)  # fmt: skip
def test_any_other_text_is_a_damaged_record(record):
    with pytest.raises(CheckpointError) as caught:
        decode(record)
    assert caught.value.reason == "header"


tags = st.sampled_from(
    ["dict", "pairs", "tuple", "complex", "bytes", "int", "float", "str", "tensor", "parameter", "opaque"]
)
almost = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tags, inner, max_size=2),
)


@settings(max_examples=500)
@given(st.text() | trees.map(lambda tree: encode(tree)[:-1]) | almost.map(json.dumps))
def test_no_text_brings_out_another_error(record):
    with contextlib.suppress(CheckpointError):
        decode(record)
