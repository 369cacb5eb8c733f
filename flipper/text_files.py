"""Text files that a user names: files and pipes are read whole, devices that have no end are not begun."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flipper.errors import UsageError


def read_text(path: Path) -> str:
    """The text of a file or pipe, UTF-8; raises OSError, UnicodeDecodeError. /dev/zero would fill the memory."""
    if path.is_char_device() and not path.samefile(os.devnull):
        raise OSError(errno.EINVAL, "a device, neither a file nor a pipe", str(path))
    return path.read_text("utf-8")


def read_named(path: Path, option: str = "") -> str:
    """As read_text, without a byte order mark; UsageError, beginning with the option that names it, when it fails."""
    who = f"{option} {path}".lstrip()
    try:
        return read_text(path).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{who} is no text in UTF-8: byte {error.start} can't be read") from error
    except OSError as error:
        raise UsageError(f"{who} can't be read: {error.strerror or error}") from error
