"""Pickle operations: what each code of a pickle stream does to the machine that reads it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flipper.checkpoints.builders import build, persistent
from flipper.checkpoints.stubs import Object, Storage, safe_key

if TYPE_CHECKING:
    from flipper.checkpoints.pickles import Machine

INTEGER_LIMIT = 1024
"""Bytes of one integer."""


class Ended(Exception):
    """The stream goes on beyond the bytes given."""


Operation = Callable[["Machine"], None]


def _pushes(make: Callable[[Machine], Any]) -> Operation:
    def operation(machine: Machine) -> None:
        machine.stack.append(make(machine))

    return operation


def _small_integer(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.position])
    machine.position += 1


def _integer_line(machine: Machine) -> int | bool:
    text = machine.line()
    return text == "01" if text in ("00", "01") else int(text)


def _long(width: int) -> Operation:
    def operation(machine: Machine) -> None:
        count = machine.number(width)
        if count > INTEGER_LIMIT:
            raise ValueError(f"an integer of {count} bytes")
        machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))

    return operation


def _signed(machine: Machine) -> int:
    return int.from_bytes(machine.take(4), "little", signed=True)


def _float(machine: Machine) -> float:
    value: float = struct.unpack(">d", machine.take(8))[0]
    return value


def _text(width: int) -> Operation:
    def operation(machine: Machine) -> None:
        first = machine.position + width
        end = first + int.from_bytes(machine.data[machine.position : first], "little")
        if end > len(machine.data):
            raise Ended
        machine.stack.append(machine.data[first:end].decode("utf-8", "surrogatepass"))
        machine.position = end

    return operation


def _old_text(width: int) -> Operation:
    """A string of Python 2: text if it is UTF-8, else one character a byte."""

    def operation(machine: Machine) -> None:
        raw = machine.take(machine.number(width))
        try:
            machine.stack.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            machine.stack.append(raw.decode("latin-1"))

    return operation


def _bytes(width: int) -> Operation:
    def operation(machine: Machine) -> None:
        machine.stack.append(machine.take(machine.number(width)))

    return operation


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


def _appends(machine: Machine) -> None:
    items = machine.marked()
    _extend(machine.stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is Object:
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:
        raise TypeError(f"{type(target).__name__} can't be appended to")


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])


def _set_items(machine: Machine) -> None:
    items = machine.marked()
    _update(machine.stack[-1], items)


def _update(target: Any, items: list[Any]) -> None:
    if type(target) is Object and target.mapping is None:
        target.mapping = {}
    mapping = target.mapping if type(target) is Object else target
    if type(mapping) is not dict:
        raise TypeError(f"{type(target).__name__} has no keys")
    for key, value in zip(items[::2], items[1::2], strict=True):
        mapping[key if type(key) is str else safe_key(key, len(mapping))] = value


def _dictionary(machine: Machine) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    _update(made, machine.marked())
    return made


def _tuple_of(count: int) -> Operation:
    def operation(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]

    return operation


def _put_long(machine: Machine) -> None:
    first = machine.position
    machine.position = first + 4
    machine.memo[int.from_bytes(machine.data[first : first + 4], "little")] = machine.stack[-1]


def _get_long(machine: Machine) -> None:
    first = machine.position
    machine.position = first + 4
    machine.stack.append(machine.memo[int.from_bytes(machine.data[first : first + 4], "little")])


def _put_small(machine: Machine) -> None:
    machine.memo[machine.data[machine.position]] = machine.stack[-1]
    machine.position += 1


def _get_small(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.position]])
    machine.position += 1


def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put_line(machine: Machine) -> None:
    machine.memo[int(machine.line())] = machine.stack[-1]


def _mark(machine: Machine) -> None:
    machine.marks.append(len(machine.stack))


def _pop(machine: Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a global needs two strings")
    machine.stack.append(machine.named(module, name))


def _reduce(machine: Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(build(function, args, machine.budget))


def _new_with_keywords(machine: Machine) -> None:
    keywords, args, function = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    made = build(function, args, machine.budget)
    if type(made) is Object and type(keywords) is dict:
        made.mapping = keywords
    machine.stack.append(made)


def _instance(machine: Machine) -> Any:
    function = machine.named(machine.line(), machine.line())
    return build(function, tuple(machine.marked()), machine.budget)


def _object(machine: Machine) -> Any:
    function, *args = machine.marked()
    return build(function, tuple(args), machine.budget)


def _persistent(machine: Machine) -> Any:
    found = persistent(machine.stack.pop())
    if type(found) is Storage:
        machine.storages.setdefault(found.key, found)
    return found


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is Object:
        target.state = state


def _skip(count: int) -> Operation:
    def operation(machine: Machine) -> None:
        machine.take(count)

    return operation


def _refused(what: str) -> Operation:
    def operation(machine: Machine) -> None:
        raise ValueError(what)

    return operation


def _unknown(machine: Machine) -> None:
    raise ValueError(f"unknown operation {machine.data[machine.position - 1]:#04x}")


def _table() -> list[Operation]:
    pushes: dict[str, Callable[[Machine], Any]] = {
        "N": lambda machine: None, "\x88": lambda machine: True, "\x89": lambda machine: False,
        "I": _integer_line, "L": lambda machine: int(machine.line().rstrip("L")), "J": _signed,
        "M": lambda machine: machine.number(2), "F": lambda machine: float(machine.line()), "G": _float,
        "S": lambda machine: machine.line()[1:-1], "V": lambda machine: machine.line(),
        "]": lambda machine: [], "l": lambda machine: machine.marked(), ")": lambda machine: (),
        "t": lambda machine: tuple(machine.marked()), "}": lambda machine: {}, "d": _dictionary,
        "\x8f": lambda machine: Object("builtins.set"),
        "\x91": lambda machine: Object("builtins.frozenset", items=machine.marked()),
        "2": lambda machine: machine.stack[-1], "g": lambda machine: machine.memo[int(machine.line())],
        "i": _instance, "o": _object,
        "c": lambda machine: machine.named(machine.line(), machine.line()),
        "Q": _persistent,
    }  # fmt: skip
    others: dict[str, Operation] = {
        "K": _small_integer, "\x8a": _long(1), "\x8b": _long(4), "T": _old_text(4), "U": _old_text(1),
        "X": _text(4), "\x8c": _text(1), "\x8d": _text(8), "B": _bytes(4), "C": _bytes(1), "\x8e": _bytes(8),
        "\x96": _bytes(8), "a": _append, "e": _appends, "\x90": _appends, "s": _set_item, "u": _set_items,
        "\x85": _tuple_of(1), "\x86": _tuple_of(2), "\x87": _tuple_of(3), "0": _pop, "(": _mark,
        "1": lambda machine: machine.marked().clear(), "p": _put_line, "q": _put_small, "r": _put_long,
        "h": _get_small, "j": _get_long, "\x94": _memoize, "\x93": _stack_global, "R": _reduce, "\x81": _reduce,
        "\x92": _new_with_keywords, "b": _build, "\x80": _skip(1),
        "\x95": _skip(8),
        "\x82": _refused("it uses the extension registry"), "\x83": _refused("it uses the extension registry"),
        "\x84": _refused("it uses the extension registry"), "P": _refused("its persistent id is text"),
        "\x97": _refused("it uses out-of-band buffers"),
        "\x98": _refused("it uses out-of-band buffers"),
    }  # fmt: skip
    table: list[Operation] = [_unknown] * 256
    for code, make in pushes.items():
        table[ord(code)] = _pushes(make)
    for code, operation in others.items():
        table[ord(code)] = operation
    return table


OPERATIONS = _table()
"""By code; STOP is none of them."""
