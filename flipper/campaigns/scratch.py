"""Scratch: temporary folders that name their process, so that what a killed one has left is found and removed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, Final

from flipper.campaigns import owners
from flipper.checkpoints.output import writing
from flipper.errors import OutputError
from flipper.training.launch import LONGEST_FOLDER

_NAME: Final = re.compile(r"flipper-(\w+-\d+-\w+)-\w{8}")
_BUILDING: Final = re.compile(r"\..+-flipper-(\w+-\d+-\w+)-\w{8}")

ROOM: Final = 1 << 18
"""Bytes that a run's temporary files need beside checkpoints: the rendezvous of its ranks, and what they write."""

_CHANGING: Final = threading.Lock()
_MADE: Final[dict[tuple[int, str], str]] = {}


class _Users:
    """How many threads are inside `scratch`, and tempfile's folder before the first of them."""

    count = 0
    usual: str | None = None


@contextmanager
def scratch() -> Iterator[None]:
    """Inside, temporary files go to one folder of this process, which goes with it; any number of threads may be in.

    It stays to the end of the process, since multiprocessing has its sockets there.
    """
    with _CHANGING:
        if _Users.count == 0:
            _Users.usual = tempfile.tempdir
            tempfile.tempdir = _own_folder(tempfile.gettempdir())
        _Users.count += 1
    try:
        yield
    finally:
        with _CHANGING:
            _Users.count -= 1
            if _Users.count == 0:
                tempfile.tempdir = _Users.usual


def in_scratch(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function inside `scratch`, in whichever process that is."""
    with scratch():
        return work(*arguments)


def made_once(home: Path, make: Callable[[Path], None]) -> None:
    """Make a folder, whole or not at all; where another process was first, its one stays.

    make: fills the folder that it is given. Raises OutputError when the disk fails.
    """
    with writing(home):
        home.parent.mkdir(parents=True, exist_ok=True)
        _sweep(home.parent, _BUILDING)
        building = home.parent / f".{home.name}-flipper-{owners.Owner.here().tag}-{os.urandom(4).hex()}"
        building.mkdir()
        try:
            make(building)
            try:
                os.rename(building, home)
            except OSError:
                if not home.is_dir():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _own_folder(parent: str) -> str:
    """This process's folder in another, for good; multiprocessing's sockets go there or, if it is too long, to /tmp."""
    folder = _made_in(parent)
    usual = tempfile.tempdir
    tempfile.tempdir = folder if len(os.fsencode(folder)) <= LONGEST_FOLDER else _made_in("/tmp")
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
    return folder


def _made_in(parent: str) -> str:
    key = (os.getpid(), parent)
    if key not in _MADE or not os.path.isdir(_MADE[key]):
        _sweep(Path(parent), _NAME)
        _MADE[key] = tempfile.mkdtemp(prefix=f"flipper-{owners.Owner.here().tag}-", dir=parent)
        # after multiprocessing has removed its own part, which has priority -100
        util.Finalize(None, shutil.rmtree, args=(_MADE[key],), kwargs={"ignore_errors": True}, exitpriority=-101)
    return _MADE[key]


def _sweep(parent: Path, name: re.Pattern[str]) -> None:
    """Remove the folders of processes that are gone."""
    with suppress(OSError):
        for entry in list(parent.iterdir()):
            found = name.fullmatch(entry.name)
            if found and owners.gone(found[1]):
                shutil.rmtree(entry, ignore_errors=True)


def check_room() -> None:
    """Raise OutputError where a run may have failed because the disk is full, which is no outcome of its faults."""
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free < ROOM:
        raise OutputError(f"no space left in {folder}, where runs keep temporary files; TMPDIR chooses another folder")
