"""The random words behind every draw: raw Philox, keyed by a seed and a purpose (flipper-draw/1)."""

from __future__ import annotations

from hashlib import sha256
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flipper.errors import UsageError

U64: TypeAlias = NDArray[np.uint64]

_TAG = b"flipper-draw/1\0"
_CHUNK = 1 << 17  # words masked at a time: a megabyte, so that the temporaries stay in cache


class Stream:
    """An endless sequence of 64-bit words that depends on a seed and a purpose, and on nothing else.

    The words are those of Philox4x64-10 (Salmon et al., SC 2011) from counter 0, in numpy's order, with
    the first 16 bytes of sha256("flipper-draw/1\\0" + seed as 8 bytes + purpose as UTF-8) as two
    little-endian words of key. Only random_raw is asked of numpy: it alone is promised to stay.

    seed: 0 <= seed < 2**64, else UsageError. purpose: what the words are for; other purposes, other words.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed is {seed}; give a whole number from 0 to 2**64 - 1")
        # Names in damaged files may hold lone surrogates, which strict UTF-8 can't spell.
        spelled = purpose.encode("utf-8", "surrogatepass")
        digest = sha256(_TAG + int(seed).to_bytes(8, "little") + spelled).digest()
        self.seed = int(seed)
        self.purpose = purpose
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        self.seek(0)

    @property
    def key(self) -> tuple[int, int]:
        """The two 64-bit words of Philox's key."""
        return int(self._key[0]), int(self._key[1])

    @property
    def position(self) -> int:
        """How many words have been consumed."""
        return self._position

    def seek(self, position: int) -> None:
        """Go to a word by its index, so that the next one read is words(...)[position] of a new stream."""
        # Philox turns its counter into four words, so any word can be reached without those before it.
        self._philox = np.random.Philox(key=self._key, counter=position // 4)
        self._philox.random_raw(position % 4)
        self._position = position

    def child(self, purpose: str) -> Stream:
        """A stream of the same seed for a part of this one's purpose, whatever was read from this one."""
        return Stream(self.seed, f"{self.purpose}\0{purpose}")

    def words(self, n: int) -> U64:
        """The next n raw words, uint64[n]."""
        self._position += n
        return self._philox.random_raw(n)

    def bits(self, n: int) -> int:
        """The next ceil(n / 64) words as one number of n bits, the first word lowest, surplus high bits cut."""
        raw = self.words(-(-n // 64)).astype("<u8").tobytes()
        return int.from_bytes(raw, "little") & ((1 << n) - 1)

    def below(self, size: int, n: int) -> U64:
        """The next n integers that are uniform in [0, size), uint64[n]; 1 <= size < 2**64, else ValueError.

        A word is masked to the width of size - 1 and rejected when it is still out of range. Exactly the
        words up to the n-th accepted one are consumed, a size of 1 included.
        """
        if not 1 <= size < 1 << 64:
            raise ValueError(f"size is {size}; it must lie in 1 .. 2**64 - 1")
        mask = np.uint64((1 << (size - 1).bit_length()) - 1)
        accepted = np.empty(n, dtype=np.uint64)
        have = 0
        while have < n:
            # Never more words than integers still missing: so none is read past the last accepted one.
            words = self.words(min(n - have, _CHUNK))
            words &= mask
            inside = words[words < np.uint64(size)]
            accepted[have : have + len(inside)] = inside
            have += len(inside)
        return accepted
