"""The stream of words: Philox by an independent implementation, literal values, exact consumption."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_draw import Words, key_of, philox4x64, pure_words

from flipper.errors import UsageError
from flipper.faults import stream as stream_module
from flipper.faults.stream import Stream

SEEDS = st.integers(0, 2**64 - 1)

# Random123's known answers for philox4x64-10: zeros, ones, digits of pi.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    (
        (2**64 - 1,) * 4,
        (2**64 - 1,) * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_reference_philox_gives_the_published_answers(counter, key, answer):
    assert philox4x64(counter, key) == answer


PINNED = {
    (0, ""): [
        0xC913A30411C85D97,
        0xAE0D20781C960CFB,
        0x1AE3EBA498973304,
        0xDC6801219A56BDA6,
    ],
    (7, "counts"): [
        0x53A525565ECBB8F0,
        0xB93EB4221D885CD0,
        0xF795A838C65A2E97,
        0x580B2756FBBA7971,
    ],
    (7, "positions"): [
        0xB1137A2C72CE2D21,
        0xFB50466532DED69D,
        0x00B0F63DF32488E2,
        0x933B94E1EC22D802,
    ],
    (18446744073709551615, "positions/conv1.weight"): [
        0x7878B17E85782E5F,
        0x99AF364E57772E52,
        0x4B5D2F83296F005C,
        0x4FB65DA773772399,
    ],
    (42, "Gewicht-ä"): [
        0xE57ACEB8ECD535AC,
        0x0A7709958581310D,
        0xBE85C9CBE11A2E66,
        0x67D6B6DB9276CD96,
    ],
}


@pytest.mark.parametrize(("seed", "purpose"), PINNED)
def test_words_are_these_for_ever(seed, purpose):
    assert pure_words(seed, purpose, 4) == PINNED[seed, purpose]
    assert Stream(seed, purpose).words(4).tolist() == PINNED[seed, purpose]


@settings(max_examples=50)
@given(seed=SEEDS, purpose=st.text(max_size=20).filter(lambda text: text.isprintable()), n=st.integers(0, 40))
def test_words_are_those_of_an_independent_philox(seed, purpose, n):
    words = Stream(seed, purpose).words(n)
    assert words.dtype == np.uint64
    assert words.tolist() == pure_words(seed, purpose, n)


@given(cuts=st.lists(st.integers(0, 9), max_size=8))
def test_words_read_in_parts_are_the_same_words(cuts):
    stream = Stream(3, "parts")
    parts = [word for cut in cuts for word in stream.words(cut).tolist()]
    assert parts == pure_words(3, "parts", sum(cuts))
    assert stream.position == sum(cuts)


@given(before=st.integers(0, 50), position=st.integers(0, 50))
def test_seek_goes_to_any_word(before, position):
    stream = Stream(3, "seek")
    stream.words(before)
    stream.seek(position)
    assert stream.words(5).tolist() == pure_words(3, "seek", position + 5)[position:]
    assert stream.position == position + 5


@given(n=st.integers(1, 300))
def test_bits_are_the_words_with_the_first_one_lowest(n):
    stream = Stream(5, "bits")
    whole = sum(word << 64 * i for i, word in enumerate(pure_words(5, "bits", -(-n // 64))))
    assert stream.bits(n) == whole % 2**n
    assert stream.position == -(-n // 64)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 17])
@settings(max_examples=40)
@given(size=st.one_of(st.integers(1, 70), st.integers(1, 2**64 - 1)), n=st.integers(0, 60))
def test_below_gives_the_accepted_words_and_consumes_no_more(chunk, size, n):
    words = Words(11, "below")
    expected = [words.below(size) for _ in range(n)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "_CHUNK", chunk)
        stream = Stream(11, "below")
        numbers = stream.below(size, n)
    assert numbers.tolist() == expected
    assert stream.position == words.read


@pytest.mark.parametrize("size", [1, 2, 2**63, 2**63 + 1, 2**64 - 1])
def test_below_at_the_edges_of_its_range(size):
    words = Words(1, "edges")
    assert Stream(1, "edges").below(size, 20).tolist() == [words.below(size) for _ in range(20)]


def test_below_one_consumes_a_word_for_each_zero():
    stream = Stream(1, "zeros")
    assert stream.below(1, 7).tolist() == [0] * 7
    assert stream.position == 7


@pytest.mark.parametrize("size", [0, -1, 2**64])
def test_below_refuses_sizes_that_64_bits_cannot_hold(size):
    with pytest.raises(ValueError, match="size"):
        Stream(1, "x").below(size, 1)


def test_a_child_does_not_depend_on_what_was_read():
    stream = Stream(9, "positions")
    early = stream.child("passing").words(4).tolist()
    stream.words(100)
    assert stream.child("passing").words(4).tolist() == early
    assert early == pure_words(9, "positions\0passing", 4)


def test_key_is_the_one_that_the_rule_names():
    assert Stream(9, "positions").key == key_of(9, "positions")


def test_a_purpose_may_hold_what_a_damaged_name_does():
    assert len(Stream(9, "positions/\udc80").words(4)) == 4


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(UsageError, match=str(seed)):
        Stream(seed, "x")
