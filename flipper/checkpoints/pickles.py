"""pickles: a machine that reads pickle streams and calls nothing: every global in them stays a name.

It is no subclass of pickle.Unpickler, since that one allocates by memo indexes and hashes keys that the stream
chooses; here time and memory follow the length of the stream.
"""

from __future__ import annotations

import struct
from typing import Any

from flipper.checkpoints.builders import Budget
from flipper.checkpoints.pickle_operations import OPERATIONS, Ended
from flipper.checkpoints.stubs import Global, Storage
from flipper.errors import CheckpointError

PICKLE_LIMIT = 256 << 20
"""Bytes of a stream."""

STEP_LIMIT = 16_000_000
"""Operations of a stream; a checkpoint of 20,000 tensors takes a million."""


_STOP = ord(".")


class Machine:
    """Runs one stream. position: the next byte; after `run`, the first one behind the stream.

    globals: every name that the stream refers to. storages: by key. steps: operations that were run.
    """

    def __init__(self, data: bytes, where: str, position: int = 0) -> None:
        self.data = data
        self.where = where
        self.position = position
        self.steps = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.storages: dict[str, Storage] = {}
        self.budget = Budget(len(data))

    def run(self) -> Any:
        """The value that the stream describes.

        Raises Ended where it goes on beyond the data, CheckpointError where it is damaged or too big.
        """
        try:
            return self._run()
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            if self.position >= len(self.data):
                raise Ended from error
            message = f"the pickle stream is damaged at byte {self.position} ({str(error)[:60]})"
            raise CheckpointError("pickle", f"{self.where}: {message}") from error

    def _run(self) -> Any:
        data, operations = self.data, OPERATIONS
        for step in range(STEP_LIMIT):
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                self.steps = step
                return self.stack.pop()
            operations[code](self)
        raise CheckpointError("pickle-too-big", f"{self.where}: a pickle stream of over {STEP_LIMIT} operations")

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.position + count
        if end > len(self.data):
            raise Ended
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, count: int) -> int:
        """The next `count` bytes as a natural number."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """The bytes up to the next newline, as text."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise Ended
        text = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return text

    def marked(self) -> list[Any]:
        """Everything above the newest mark, taken off the stack."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def named(self, module: str, name: str) -> Global:
        """The stub of a global."""
        return self.globals.setdefault((module, name), Global(module, name))


def load(data: bytes, where: str) -> tuple[Any, Machine]:
    """The value of the stream that `data` holds, and the machine that read it.

    where: names the stream in messages. Raises CheckpointError: pickle, pickle-too-big.
    """
    if len(data) > PICKLE_LIMIT:
        raise CheckpointError("pickle-too-big", f"{where}: {len(data)} bytes; the limit is {PICKLE_LIMIT}")
    machine = Machine(data, where)
    try:
        return machine.run(), machine
    except Ended:
        raise CheckpointError("pickle", f"{where}: the pickle stream ends before its value does") from None
