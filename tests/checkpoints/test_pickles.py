"""The pickle machine against pickle itself, and streams that would hurt a real unpickler."""

from __future__ import annotations

import collections
import pickle
import struct
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flipper.checkpoints.known_globals import known
from flipper.checkpoints.pickled_tree import PickledTree, globals_note
from flipper.checkpoints.pickles import PICKLE_LIMIT, load
from flipper.checkpoints.stubs import Global, Object
from flipper.checkpoints.tree import Leaf, Opaque
from flipper.errors import CheckpointError

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=30,
)


def value_of(data: bytes):
    return load(data, "test")[0]


def tree_of(data: bytes):
    value, machine = load(data, "test")
    return PickledTree(value, "test", machine.steps + 100_000).root


def refused(data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        tree_of(data)
    assert "\n" not in str(caught.value)
    return caught.value


@given(plain, st.integers(2, 5))
def test_plain_values_come_out_as_pickle_would_load_them(value, protocol):
    assert value_of(pickle.dumps(value, protocol)) == value


def test_the_old_text_protocols_are_read():
    for protocol in (0, 1):
        data = pickle.dumps([1, -5, 1 << 70, 2.5, None, True, False, {"a": (1, 2)}], protocol)
        assert value_of(data) == [1, -5, 1 << 70, 2.5, None, True, False, {"a": (1, 2)}]


def test_containers_of_the_standard_library_become_plain():
    state = {
        "o": collections.OrderedDict(b=1, a=2), "d": collections.defaultdict(int, x=1), "n": collections.Counter("aab"),
        "c": 1 + 2j, "y": bytearray(b"xy"), "s": {1, 2}, "f": frozenset([3]),
    }  # fmt: skip
    for protocol in (2, 4, 5):
        tree = tree_of(pickle.dumps(state, protocol))
        assert tree["o"] == {"b": 1, "a": 2}
        assert list(tree["o"]) == ["b", "a"]
        assert tree["d"] == {"x": 1}
        assert tree["n"] == {"a": 2, "b": 1}
        assert tree["c"] == 1 + 2j
        assert tree["y"] == b"xy"
        assert tree["s"] == Opaque("builtins.set") or tree["s"] == Opaque("__builtin__.set")


def test_a_call_of_anything_stays_an_inert_object():
    value = value_of(b"\x80\x02cos\nsystem\nX\x07\x00\x00\x00exit 99\x85R.")
    assert type(value) is Object
    assert value.name == "os.system"
    chain = value_of(b"\x80\x02cbuiltins\ngetattr\ncos\nenviron\nX\x06\x00\x00\x00system\x86RX\x01\x00\x00\x00x\x85R.")
    assert chain.name == "builtins.getattr"


def test_build_can_not_touch_a_builder():
    stream = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x0c\x00\x00\x00__defaults__K\x01sb."
    assert value_of(stream) == Global("torch._utils", "_rebuild_tensor_v2")


@pytest.mark.parametrize(
    "stream",
    [
        b"", b".", b"\x80\x02", b"K", b"(", b"X\x01\x00\x00\x00\xff.",
        b"\x80\x02K\x01K\x02\x86", b"h\x05.", b"}K\x01s.", b"K\x01a.", b"t.", b"\xff.",
        b"\x82\x01.", b"\x97.", b"Pabc\n.", b"K\x01Q.", b"I12x\n.", b"F1.x\n.", b"cos\n", b"X\xff\xff\xff\xffab.",
        b"\x8e" + b"\xff" * 8 + b".", b"\x8b\xff\xff\xff\xff.", b"\x8bA\x04\x00\x00" + b"1" * 1089 + b".",
        b"ctorch\nSize\n]K\x01J\xff\xff\xff\xffe\x85R.", b"L" + b"9" * 5000 + b"L\n.", b"(K\x01d.", b"(o.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.", b"c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00hex\x86R.",
    ],
)  # fmt: skip
def test_damaged_streams_are_refused_by_name(stream):
    assert refused(stream).reason == "pickle"


def test_a_huge_memo_index_costs_nothing():
    tracemalloc.start()
    assert value_of(b"K\x01r\xff\xff\xff\xff.") == 1
    assert value_of(b"K\x01p99999999999\n.") == 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_deep_nesting_is_refused_and_costs_no_stack():
    for opening, closing in [(b"]", b"a"), (b")", b"\x85"), (b"}K\x01", b"s")]:
        depth = 200_000
        stream = opening * depth + b"N" + closing * depth + b"."
        if opening == b")":
            stream = b")" + b"\x85" * depth + b"."
        assert refused(stream).reason == "pickle-too-deep"


def test_a_deep_tuple_as_a_key_is_not_hashed():
    stream = b"})" + b"\x85" * 300_000 + b"K\x01s."
    assert tree_of(stream) == {"tuple-0": 1}


def test_keys_can_not_be_made_to_collide():
    keys = [k * ((1 << 61) - 1) for k in range(1, 20_001)]
    stream = b"}(" + b"".join(pickle.dumps(key, 2)[2:-1] + b"N" for key in keys) + b"u."
    value = value_of(stream)
    assert len(value) == len(keys)
    assert all(
        type(key) is str for key in value if key not in keys[:8]
    )  # those beyond 64 bits: a string's hash is salted


def test_shared_lists_that_grow_without_bound_are_refused():
    stream = b"]q\x00" + b"".join(
        b"](" + b"".join(b"h" + bytes([level]) for _ in range(10)) + b"eq" + bytes([level + 1]) for level in range(12)
    )
    assert refused(stream + b".").reason == "pickle-too-big"


def test_shared_values_appear_under_each_of_their_names():
    shared = {"x": 1}
    assert tree_of(pickle.dumps({"a": shared, "b": [shared]}, 2)) == {"a": {"x": 1}, "b": [{"x": 1}]}


def test_values_that_hold_themselves_end():
    loop: list = [1]
    loop.append(loop)
    assert tree_of(pickle.dumps(loop, 2)) == [1, Opaque("cycle")]


def test_calls_can_not_copy_more_than_the_stream_holds():
    text = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000 + b"q\x00"
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    assert refused(b"](" + text + call * 50 + b"e.").reason == "pickle"


@pytest.mark.parametrize("function", [b"ccopyreg\n__newobj__\n", b"ccollections\ndefaultdict\n"])
def test_arguments_that_many_calls_share_are_not_copied_for_each(function):
    """300 kB asked for 16 GB so."""
    shared = b"(N]" + b"N" * 50_000 + b"tq\x00"
    assert "copy more" in str(refused(b"(" + shared + (function + b"h\x00R") * 50 + b"t."))


WRAPPED = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n"
"""What rebuilds a tensor without a storage, whose attributes are then looked at."""
INNER = WRAPPED + b"N(ctorch\nfloat32\n))\x89t"
SUBCLASS = b"ctorch._tensor\n_rebuild_from_type_v2\n"


def test_attributes_that_many_wrappers_share_are_not_looked_through_for_each():
    state = b"}(" + b"".join(pickle.dumps(key, 2)[2:-1] + b"N" for key in range(20_000)) + b"uq\x00"
    call = SUBCLASS + b"(" + INNER + b"h\x00tR"
    assert "copy more" in str(refused(state + b"(" + call * 30 + b"t."))


def test_attributes_of_a_wrapper_are_named_by_strings_alone():
    """An object as a name would be printed, and one that shares its parts prints without end."""
    parts = b"]q\x00" + b"0](h\x00h\x00eq\x00" * 60 + b"0"
    tensor = WRAPPED + b"(ctorch\nfloat32\n))\x89tR"
    state = b"}ca\nb\n)Rh\x00b" + tensor + b"s"
    assert tree_of(parts + SUBCLASS + b"(" + INNER + state + b"tR.") == Leaf("tensor")


def test_a_subclass_of_a_subclass_without_end_costs_no_stack():
    level = b"0(h\x00Nh\x01Ntq\x01"
    assert refused(SUBCLASS + b"q\x000)q\x01" + level * 50_000 + b"0h\x00h\x01R.").reason == "pickle"


def test_a_long_text_in_a_key_is_not_printed_each_time_it_is_used():
    text = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000
    assert set(tree_of(text + b"\x85q\x00}" + b"h\x00Ns" * 3 + b".")) == {"tuple-0", "tuple-1", "tuple-2"}
    assert tree_of(pickle.dumps({("layer.weight", 0): 1}, 2)) == {"('layer.weight', 0)": 1}


def test_objects_that_hold_objects_are_visited_once():
    """Twice at each level would be a thousand million visits of these."""
    stream = b"ca\nb\nq\x000" + b"h\x00)R}X\x01\x00\x00\x00x" * 60 + b"N" + b"sb" * 60 + b"."
    assert tree_of(stream) == Opaque("a.b")


def test_objects_without_content_are_small():
    count = 100_000
    tracemalloc.start()
    load(b"(" + b"\x8f" * count + b"t.", "test")
    assert tracemalloc.get_traced_memory()[1] < 120 * count
    tracemalloc.stop()


def test_too_big_a_stream_is_refused_unread():
    assert refused(bytes(PICKLE_LIMIT + 1)).reason == "pickle-too-big"


def test_surrogates_and_latin_bytes_survive():
    assert value_of(pickle.dumps("\ud800", 2)) == "\ud800"
    assert value_of(b"U\x02\xff\xfe.") == "\xff\xfe"


def test_names_that_every_checkpoint_has_are_no_news():
    assert known(Global("torch", "FloatStorage"))
    assert known(Global("torch.nn.modules.linear", "Linear"))
    assert known(Global("__builtin__", "set"))
    assert not known(Global("posix", "system"))
    assert not known(Global("torch.hub", "load"))


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_named_reason(data):
    with suppress(CheckpointError):
        tree_of(data)
    with suppress(CheckpointError):
        tree_of(data + b".")


@given(plain, st.data())
def test_damaged_real_streams_give_a_value_or_a_named_reason(value, draw):
    data = bytearray(pickle.dumps({"v": value, "w": value}, draw.draw(st.integers(0, 5))))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with suppress(CheckpointError):
        tree_of(bytes(data))


def test_names_in_a_stream_can_not_steer_a_terminal():
    value, machine = load(b"\x8c\x05a\n\x1b[mX\x04\x00\x00\x00evil\x93.", "test")
    assert type(value) is Global
    (note,) = globals_note(iter(machine.globals.values()))
    assert "a\\x0a\\x1b[m.evil" in note
