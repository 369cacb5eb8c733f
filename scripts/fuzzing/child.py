"""Runs cases in one process, which may die of them: `child.py CORPUS FORMAT SEED FIRST LAST PROGRESS KEEP`.

Prints one JSON line a finding, and how many cases were still good enough to be struck. PROGRESS holds the number of
the case that is being run.
"""

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import mutate

from flipper.checkpoints import open_checkpoint
from flipper.checkpoints.describe import describe
from flipper.errors import FlipperError
from flipper.faults.draw import draw, population_of
from flipper.faults.model import FaultModel
from flipper.injection.inject import inject
from flipper.strict_json import text

MEMORY = 512 << 20
"""Bytes that a case may take beyond what the process held before the first."""

SECONDS = 3
"""CPU time that a case may take."""


class TooSlow(BaseException):
    """A case took too long; no `except Exception` may hide it."""


def main(corpus: str, kind: str, seed: str, first: str, last: str, progress: str, keep: str) -> None:
    import_module("h5py")  # its libraries count as held before the first case
    healthy = sorted(Path(corpus, kind).iterdir())
    contents = [path.read_bytes() for path in sorted(Path(corpus, kind).rglob("*")) if path.is_file()]
    signal.signal(signal.SIGPROF, _too_slow)
    injected = 0
    limit = _held() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory(prefix="flipper-fuzz-") as folder, open(progress, "wb", buffering=0) as counter:
        for number in range(int(first), int(last)):
            os.pwrite(counter.fileno(), number.to_bytes(8, "little"), 0)
            case = Path(folder, "case")
            chance = random.Random(f"{seed}/{kind}/{number}")
            damaged(chance.choice(healthy), contents, chance, case)
            finding = tried(case)
            injected += Path(folder, "out").exists()
            if finding is not None:
                _keep(case, Path(keep, f"{kind}-{seed}-{number}"))
                print(json.dumps({"case": number, **finding}), flush=True)
            for path in Path(folder).iterdir():
                _remove(path)
    print(json.dumps({"injected": injected}), flush=True)


def damaged(source: Path, contents: list[bytes], chance: random.Random, target: Path) -> None:
    """Write a damaged copy of a checkpoint; of a directory, one file is damaged or missing."""
    if source.is_file():
        target.write_bytes(mutate.mutated(source.read_bytes(), contents, chance))
        return
    shutil.copytree(source, target)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    heads = [path for path in files if path.name == ".metadata" or path.suffix == ".json"]
    victim = chance.choice(heads if heads and chance.random() < 0.7 else files)
    if chance.random() < 0.03:
        victim.unlink()
    else:
        victim.write_bytes(mutate.mutated(victim.read_bytes(), contents, chance))


def tried(case: Path) -> dict[str, Any] | None:
    """Do to a file what users do; says what is wrong if anything but a good end or a FlipperError comes out."""
    before = _snapshot(case)
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        use(case)
    except FlipperError as error:
        message = str(error)
        if message.count("\n") > 1 or len(message) > 2000:
            return {"kind": "message", "where": message[:200]}
    except TooSlow:
        return {"kind": "slow", "where": _where()}
    except BaseException as error:
        return {"kind": type(error).__name__, "where": _where(), "message": str(error)[:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if _snapshot(case) != before:
        return {"kind": "source changed", "where": ""}
    left = [path.name for path in case.parent.iterdir() if path.name.startswith(".flipper")]
    if left:
        return {"kind": "left behind", "where": left[0]}
    if (seconds := time.process_time() - start) > SECONDS:
        return {"kind": "slow", "where": f"{seconds:.1f} s in one call"}
    return None


def use(case: Path) -> None:
    """Open, look at the structure, inspect, check, draw one fault, inject it into a copy."""
    model = FaultModel()
    with open_checkpoint(case) as checkpoint:
        checkpoint.tree()
        rows = io.TextIOWrapper(io.BytesIO(), "utf-8")
        for tensor in checkpoint.tensors:
            rows.write(text(describe(checkpoint, tensor, False)))
        rows.write(text([*checkpoint.notes, population_of(checkpoint, model).record()]))
        rows.flush()
        for _ in checkpoint.problems():
            pass
        inject(checkpoint, case.with_name("out"), draw(checkpoint, model, 1))


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _where() -> str:
    """The innermost place in flipper of the exception that is being handled, and the innermost of all."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    own = [frame for frame in frames if "/flipper/" in frame.filename]
    named = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in (own[-1:] + frames[-1:])]
    return " < ".join(dict.fromkeys(named))


def _snapshot(path: Path) -> list[tuple[str, bytes]]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [(str(file), file.read_bytes()) for file in files]


def _held() -> int:
    """Bytes of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _keep(case: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove(target)
    shutil.copytree(case, target) if case.is_dir() else shutil.copyfile(case, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
