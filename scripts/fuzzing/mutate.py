"""Mutations: how bytes are damaged, blindly and with knowledge of what stands where."""

import io
import json
import pickletools
import random
import zipfile
from collections.abc import Callable
from typing import Any

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
OPCODES = bytes(ord(operation.code) for operation in pickletools.opcodes)


def mutated(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The content of a file, damaged once or some times; others: what pieces may be taken from."""
    aware = [mutation for fits, mutation in AWARE if fits(data)]
    if aware and draw.random() < 0.5:
        data = draw.choice(aware)(data, draw)
        if draw.random() < 0.8:
            return data
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        data = draw.choice(BLIND)(data, others, draw)
    return data


def place(data: bytes, draw: random.Random) -> int:
    """A position, mostly near the beginning or the end, where headers and directories lie."""
    size = max(len(data), 1)
    span = draw.choice((size, size, min(size, 64), min(size, 512)))
    return draw.randrange(span) if draw.random() < 0.7 else size - 1 - draw.randrange(span)


def _bits(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    content = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 2, 8))):
        content[place(content, draw)] ^= 1 << draw.randrange(8)
    return bytes(content)


def _byte(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    content = bytearray(data or b"\0")
    content[place(content, draw)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    return bytes(content)


def _number(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """A whole number of a field's width, often one near a limit, or near what stood there."""
    at, width = place(data, draw), draw.choice((2, 4, 8))
    order = draw.choice(("little", "little", "big"))
    value = draw.choice((*NUMBERS, len(data), int.from_bytes(data[at : at + width], order)))
    value = (value + draw.choice((0, 0, -1, 1, 8))) % (1 << 8 * width)
    return data[:at] + value.to_bytes(width, order) + data[at + width :]


def _cut(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    return data[: place(data, draw)]


def _grown(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.choice((1, 4, 100)))


def _without(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    at = place(data, draw)
    return data[:at] + data[at + draw.choice((1, 2, 4, 8, 64)) :]


def _repeated(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    at, size = place(data, draw), draw.choice((1, 8, 64, 500))
    return data[:at] + data[at : at + size] * draw.choice((2, 2, 40)) + data[at + size :]


def _spliced(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    other = draw.choice(others)
    at, start, size = place(data, draw), place(other, draw), draw.choice((4, 16, 200, 10_000))
    return data[:at] + other[start : start + size] + data[at + draw.choice((0, size)) :]


def _zeroed(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    at, size = place(data, draw), draw.choice((1, 8, 100))
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


Blind = Callable[[bytes, list[bytes], random.Random], bytes]
BLIND: tuple[Blind, ...] = (_bits, _bits, _byte, _number, _number, _cut, _grown, _without, _repeated, _spliced, _zeroed)


def _is_header(data: bytes) -> bool:
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data)


def _header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header says something else, and has the right length."""
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(_edited(json.loads(data[8 : 8 + size]), draw)).encode()
    if draw.random() < 0.3:
        text = _text_edit(text, draw)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _index(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(_edited(json.loads(data), draw)).encode()


def _text_edit(text: bytes, draw: random.Random) -> bytes:
    piece = draw.choice(
        (b"[" * 3000, b'{"a":' * 3000, b"1" * 5000, b"1e999", b"-0", b"NaN", b'"\\ud800"', b"\xff", b"]", b",")
    )
    at = draw.randrange(len(text) + 1)
    return text[:at] + piece + text[at:]


def _edited(value: Any, draw: random.Random) -> Any:
    """A JSON value with one part of it replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        changed = dict(value)
        if draw.random() < 0.8:
            changed[key] = _edited(value[key], draw)
        else:
            name = draw.choice(("", "a/b", "../x", "\ud800", "a" * 3000, "__metadata__", ".", "a\nb\x1b[31m"))
            changed[name] = changed.pop(key)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _edited(value[at], draw), *value[at + 1 :]]
    odd = (
        None,
        True,
        -1,
        0.5,
        1e300,
        10**30,
        "",
        "F32",
        "U64",
        "F6_E2M3",
        [],
        {},
        [1] * 70,
        [1 << 62, 4],
        "../../x",
        "\ud800",
    )
    return draw.choice((*odd, *NUMBERS))


def _archive(data: bytes, draw: random.Random) -> bytes:
    """A zip archive, whole and with right checksums, with one entry damaged."""
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
            names = old.namelist()
            likely = [name for name in names if name.endswith((".pkl", ".h5", ".json", "byteorder"))]
            chosen = draw.choice(likely or names)
            for name in names:
                content = old.read(name)
                if name == chosen:
                    content = _entry(content, name, draw)
                method = zipfile.ZIP_DEFLATED if draw.random() < 0.1 else zipfile.ZIP_STORED
                new.writestr(zipfile.ZipInfo(name), content, method)
    except (zipfile.BadZipFile, NotImplementedError, EOFError):
        return data
    return buffer.getvalue()


def _entry(content: bytes, name: str, draw: random.Random) -> bytes:
    if name.endswith(".pkl"):
        return _pickle(content, draw)
    return mutated(content, [content], draw)


def _pickle(data: bytes, draw: random.Random) -> bytes:
    """A pickle stream, and what follows it, with operations taken away, repeated, exchanged, or altered."""
    starts = _operations(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        if len(starts) < 3:
            return data
        first = draw.randrange(len(starts) - 1)
        begin, end = starts[first], starts[first + 1]
        other = draw.randrange(len(starts) - 1)
        piece = data[starts[other] : starts[other + 1]]
        new = draw.choice((b"", piece, piece + data[begin:end], data[begin:end] * 2, _argument(data[begin:end], draw),
                           bytes([draw.choice(OPCODES)]), draw.choice(SNIPPETS)))  # fmt: skip
        data = data[:begin] + new + data[end:]
        starts = _operations(data)
    return data


SNIPPETS = (
    b"(" * 2000,
    b")" + b"\x85" * 3000,
    b"cposix\nsystem\nX\x04\0\0\0true\x85R",
    b"\x8a\xff" + b"\x7f" * 255,
    b"\x8b\xff\xff\xff\x7f",
    b"X\xff\xff\xff\xff",
    b"I" + b"9" * 5000 + b"\n",
    b"]\x94h\0a",
    b"j\xff\xff\xff\x7f",
    b"r\xff\xff\xff\xff",
    b"ccollections\nOrderedDict\n)R",
    b"ctorch\nSize\n",
    b"G\x7f\xf0\0\0\0\0\0\0",
    b"V\\ud800\n",
    b"}q\0h\0h\0s",
    b"Q",
)
"""Pieces of streams that hurt: deep, endless, self-containing, calling."""


def _operations(data: bytes) -> list[int]:
    """Where the operations of the first streams begin."""
    starts: list[int] = []
    stream = io.BytesIO(data)
    for _ in range(5):
        try:
            starts += [place for _, _, place in pickletools.genops(stream) if place is not None]
        except (ValueError, OverflowError, UnicodeDecodeError, IndexError, MemoryError):
            break
    return starts


def _argument(operation: bytes, draw: random.Random) -> bytes:
    if len(operation) < 2:
        return bytes([draw.choice(OPCODES)])
    at = draw.randrange(1, len(operation))
    return operation[:at] + bytes([draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))]) + operation[at + 1 :]


def _directory(data: bytes, draw: random.Random) -> bytes:
    """A zip archive with one field of one of its records altered."""
    marks = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08")
    places = [at for mark in marks for at in _found(data, mark)]
    if not places:
        return data
    at, width = draw.choice(places) + draw.randrange(4, 46), draw.choice((2, 4))
    value = draw.choice((*NUMBERS, len(data), draw.randrange(1 << 16))) % (1 << 8 * width)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def _found(data: bytes, mark: bytes) -> list[int]:
    places, at = [], data.find(mark)
    while at >= 0:
        places.append(at)
        at = data.find(mark, at + 1)
    return places


def _is_zip(data: bytes) -> bool:
    return data[:4] == b"PK\3\4"


Aware = Callable[[bytes, random.Random], bytes]
AWARE: tuple[tuple[Callable[[bytes], bool], Aware], ...] = (
    (_is_header, _header),
    (lambda data: data[:1] == b"{", _index),
    (_is_zip, _archive),
    (_is_zip, _directory),
    (lambda data: data[:1] == b"\x80", _pickle),
)
"""What fits which content."""
