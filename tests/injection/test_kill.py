"""kill -9 at any moment: an altered file can be undone to its exact bytes, and no half copy bears the output's name."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_makers import drawn, gzip_file, names_in, safetensors_file, torch_file

from flipper.checkpoints import open_checkpoint
from flipper.checkpoints.hdf5 import Hdf5File
from flipper.errors import MismatchError, OutputError, UsageError
from flipper.injection import patching
from flipper.injection.inject import inject
from flipper.injection.scratch import scratch
from flipper.injection.undo import undo

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

KINDS = {
    "plain": (safetensors_file, {"count": 300}),
    "zip-crc": (torch_file, {"count": 300}),
    "gzip-growth": (gzip_file, {"count": 300}),
    "long-table": (lambda folder: safetensors_file(folder, 20_000), {"count": 12_000}),
}


def killed(work: Callable[[], object], after: float) -> bool:
    """Run `work` in a forked process and kill -9 it `after` seconds; returns whether it had finished by then."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


def duration(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.mark.parametrize("kind", KINDS)
def test_an_injection_that_is_killed_in_place_can_be_undone(kind: str, tmp_path: Path) -> None:
    make, options = KINDS[kind]
    path = make(tmp_path)
    former = path.read_bytes()
    plan = drawn(path, **options)
    inject(path, None, plan)
    altered = path.read_bytes()
    undo(path)
    assert path.read_bytes() == former != altered
    longest = max(duration(lambda: inject(path, None, plan)), 0.002)
    undo(path)
    moments = random.Random(kind)
    seen = set()
    for _ in range(20):
        killed(lambda: inject(path, None, plan), moments.uniform(0, 1.2 * longest))
        seen.add(path.read_bytes())
        restore(path)
        assert path.read_bytes() == former
        with open_checkpoint(path) as checkpoint:
            assert not list(checkpoint.problems())
    assert seen  # whatever was there, among it neither the old nor the new content, was taken back


def restore(path: Path) -> None:
    """What a user does after a crash; scratch files and a table without its manifest may be left."""
    with suppress(UsageError):  # there is no manifest: it was killed before a byte was altered
        undo(path)
    for left in path.parent.iterdir():
        if left != path:
            assert left.name.startswith(".flipper-") or left.name.endswith(".npz")
            left.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_every_write_may_be_the_last(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed right after the n-th write to the file, for every n, and again while that is being undone."""
    make, options = KINDS[kind]
    path = make(tmp_path)
    former = path.read_bytes()
    plan = drawn(path, **options)
    write = patching._write
    for last in range(1, 8):
        count = 0

        def dying(descriptor: int, data: object, offset: int, last: int = last) -> None:
            nonlocal count
            count += 1
            write(descriptor, data[: len(data) // 2 + 1] if count == last else data, offset)  # torn, then killed
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(patching, "_write", dying)
        finished = killed_itself(lambda: inject(path, None, plan))
        assert not (finished and last == 1)
        if finished:
            monkeypatch.setattr(patching, "_write", write)
        else:
            killed_itself(lambda: undo(path))  # dies at its n-th write too
            monkeypatch.setattr(patching, "_write", write)
        restore(path)
        assert path.read_bytes() == former


def test_the_scratch_copy_of_a_killed_injection_is_cleared_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are rewritten in a copy beside the file first, which may be as big as the file."""
    path = gzip_file(tmp_path)
    former = path.read_bytes()
    plan = drawn(path, count=300)

    def dies() -> None:
        monkeypatch.setattr(Hdf5File, "rewrite", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        inject(path, None, plan)

    for following in (lambda: undo(path), lambda: inject(path, None, plan)):
        assert not killed_itself(dies)
        assert names_in(tmp_path) == [".flipper-model.h5.tmp", "model.h5"]
        assert path.read_bytes() == former
        with suppress(UsageError):  # for undo there is nothing to take back
            following()
        assert ".flipper-model.h5.tmp" not in names_in(tmp_path)
    undo(path)
    assert path.read_bytes() == former
    assert names_in(tmp_path) == ["model.h5"]


def test_the_scratch_copy_of_a_living_injection_stays(tmp_path: Path) -> None:
    path = gzip_file(tmp_path)
    plan = drawn(path, count=3)
    with scratch(path) as copy:
        with pytest.raises(OutputError, match="being altered already"):
            inject(path, None, plan)
        with pytest.raises(UsageError, match="no model"):
            undo(path)
        assert copy.exists()
    inject(path, None, plan)
    assert names_in(tmp_path) == ["model.h5", "model.h5.flipper.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_leaves_the_file_as_it_was(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = KINDS[kind]
    path = make(tmp_path)
    former = path.read_bytes()
    plan = drawn(path, **options)
    write = patching._write

    def interrupted(descriptor: int, data: object, offset: int) -> None:
        write(descriptor, data[: len(data) // 2 + 1], offset)
        monkeypatch.setattr(patching, "_write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(patching, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        inject(path, None, plan)
    assert path.read_bytes() == former
    assert names_in(tmp_path) == [path.name]


def test_undo_refuses_a_rewritten_file_that_was_cut_or_grew(tmp_path: Path) -> None:
    """The patches alone would not make it what it was."""
    path = gzip_file(tmp_path)
    inject(path, None, drawn(path, count=300))
    altered = path.read_bytes()
    for other in (altered[: len(altered) // 2], altered + bytes(8)):
        path.write_bytes(other)
        with pytest.raises(MismatchError, match=f"it has {len(other)} bytes, .* nothing was undone"):
            undo(path)
        assert path.read_bytes() == other


def killed_itself(work: Callable[[], object]) -> bool:
    """Run `work` in a forked process; returns whether it ended before it killed itself."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


def test_a_copy_that_is_killed_has_no_name(tmp_path: Path) -> None:
    """The output is there whole or not at all."""
    source = torch_file(tmp_path, 400_000)
    plan = drawn(source, count=500)
    out = tmp_path / "out.pt"
    inject(source, out, plan)
    whole = out.read_bytes()
    longest = duration(lambda: inject(source, out, plan, force=True))
    moments = random.Random(1)
    for _ in range(20):
        out.unlink(missing_ok=True)
        killed(lambda: inject(source, out, plan, force=True), moments.uniform(0, longest))
        assert not out.exists() or out.read_bytes() == whole
    assert source.read_bytes() != whole
