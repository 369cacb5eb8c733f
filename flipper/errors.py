"""Every error that flipper raises on purpose, each with the exit code that a shell sees.

    FlipperError                  1  failed at run time
    ├── UsageError                2  wrong usage (also ValueError)
    │   └── NothingEligible       2  the selection leaves no bit to strike
    ├── CheckpointError           4  the input is not a readable checkpoint (also ValueError)
    ├── TooFewBits                1  fewer bits can be struck, or pass the guards, than were asked for
    ├── OutputError               1  the output exists, or can't be written (also OSError)
    ├── MismatchError             1  a plan or manifest does not fit the checkpoint
    └── TrainingError             1  a rank failed or died
        ├── HangError             1  no rank gave a sign any more, or the run took too long
        ├── EndedError            1  somebody ended a rank, by a signal that asks to end
        └── StartError            1  the machine lacks what ranks need to be started
"""

from __future__ import annotations

from typing import Final

REASONS: Final = {
    "truncated": "the file ends before its content does",
    "foreign": "the content is of no known checkpoint format",
    "header": "a rule of the format's header is broken",
    "checksum": "a stored checksum does not match the data",
    "missing-shard": "a file that the checkpoint names is not there",
    "encrypted": "an archive entry is encrypted",
    "spanned": "the archive spans several files",
    "pickle": "the pickle stream is damaged",
    "pickle-too-deep": "the pickle stream nests too deep",
    "pickle-too-big": "the pickle stream is too big",
    "locked": "another process has the file open for writing",
    "unsupported-storage": "the bytes lie in a way that flipper can't patch",
    "unreadable": "the operating system refuses to read it",
}


_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def printable(text: str) -> str:
    """The text on one line, control characters spelled out: names in a file must not steer a terminal."""
    return text.translate(_CONTROLS)


LONGEST: Final = 1000
"""Characters of a message about a checkpoint: names in a damaged file may have millions."""


def shortened(text: str) -> str:
    """The text with its middle left out where it is too long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} ... {text[-190:]}"


class FlipperError(Exception):
    """Base of all errors that flipper raises on purpose; the message is one or two lines for the user."""

    exit_code = 1


class UsageError(FlipperError, ValueError):
    """The options don't make sense together, or name something that isn't there."""

    exit_code = 2


class RecipeError(UsageError):
    """A user's recipe can't be loaded."""


class NothingEligible(UsageError):
    """The selection leaves no bit to strike."""


class CheckpointError(FlipperError, ValueError):
    """The input is not a readable checkpoint. `reason` is a key of REASONS."""

    exit_code = 4

    def __init__(self, reason: str, message: str) -> None:
        if reason not in REASONS:
            raise KeyError(reason)
        super().__init__(f"{printable(shortened(message))} [{reason}]")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, str]]:
        # The default would call __init__ with the joined text only, and so break every process pool.
        return type(self), (self.reason, self.message)


class TooFewBits(FlipperError):
    """Fewer bits can be struck, or pass the guards, than were asked for. available: how many can."""

    def __init__(self, message: str, available: int = 0) -> None:
        super().__init__(message)
        self.available = available


class OutputError(FlipperError, OSError):
    """The output exists already, or can't be written."""


class MismatchError(FlipperError):
    """A plan or a manifest does not fit the checkpoint that it should strike."""


class TrainingError(FlipperError):
    """A rank of a training run failed, died or hung."""


class HangError(TrainingError):
    """No rank of a training run gave a sign any more, or it took longer than it may."""


class EndedError(TrainingError):
    """Somebody ended a process of a training run: a user, or a batch system, by a signal that asks to end."""


class StartError(TrainingError):
    """The machine has too few files, processes or too little memory to start the ranks of a training run."""


DAMAGED: Final = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What comes of reading a file of flipper's own that is not as it was written."""
