"""Progress: a bar on stderr while a large checkpoint is worked on, for a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from flipper.cli.output import SAMPLED, Record, format_or_default

if TYPE_CHECKING:
    from pathlib import Path

LARGE = 1 << 28
"""Bytes to be read from which a bar is shown: below, the work is done before one can look."""


@contextmanager
def progress(work: str, total: int, quiet: bool) -> Iterator[None]:
    """Show how much of `total` bytes this process has read since; nothing without a terminal, or for little.

    The kernel counts what is read, in copies that it makes itself too; so no function has to report on its way.
    """
    if quiet or total < LARGE or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    begun = _bytes_read()

    class Bar(Progress):
        def get_renderables(self) -> Iterable[Any]:
            now = _bytes_read()
            if begun is not None and now is not None:
                for task in self.task_ids:
                    self.update(task, completed=min(total, now - begun))
            return super().get_renderables()

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    settings: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with Bar(*columns, console=Console(stderr=True), **settings) as bar:
        bar.add_task(work, total=None if begun is None else total)
        yield


@contextmanager
def step_bar() -> Iterator[Any]:
    """A bar of rich's that counts steps, and its task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar, bar.add_task("starting", total=None)


def watched(
    rows: Iterable[Record], work: str, total: int, style: str | None, quiet: bool
) -> Generator[Record, None, None]:
    """The rows, under a bar while they are worked out; on a terminal it is gone before the first is printed."""
    if not sys.stdout.isatty():
        with progress(work, total, quiet):
            yield from rows
        return
    following = iter(rows)
    with progress(work, total, quiet):
        first = list(islice(following, SAMPLED if format_or_default(style) == "table" else 1))
    yield from chain(first, following)


def size_of(*paths: Path | None) -> int:
    """Bytes of files, and of the files in directories, together; links that lead nowhere count nothing."""
    files = (path for path in paths if path is not None)
    return sum(sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file()) if path.is_dir()
               else path.stat().st_size for path in files)  # fmt: skip


def _bytes_read() -> int | None:
    """What this process has read so far, by the kernel's count; None where there is no such count."""
    try:
        with open("/proc/self/io", encoding="ascii") as counters:
            return int(next(counters).removeprefix("rchar: "))
    except (OSError, StopIteration, ValueError):
        return None
