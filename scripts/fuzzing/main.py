"""Damages small checkpoints and lets flipper open, inspect, check and strike them.

Only flipper's own errors may come out; memory and time of each case are bounded. Cases run in child processes, so
that a crash of a library is told apart and ends one case only. Exit 3 when anything was found.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = ("pytorch", "legacy", "hdf5", "safetensors", "dcp", "keras")
HERE = Path(__file__).parent
BATCH = 2000
"""Cases that one process runs."""

STALLED = 60
"""Seconds without a new case after which a process is given up: it hangs where no signal reaches."""


@dataclass(frozen=True)
class Run:
    """What is fuzzed. corpus: folder of the healthy files. keep: folder for inputs that show something."""

    kind: str
    seed: int
    corpus: Path
    keep: Path


def findings(run: Run, first: int, last: int) -> Iterator[dict[str, Any]]:
    """All findings of the cases from first to last - 1."""
    while first < last:
        stop = min(first + BATCH, last)
        found, ended, reached = batch(run, first, stop)
        yield from found
        if ended != 0:
            name = "hang" if ended is None else _ending(ended)
            yield {"case": reached, "kind": f"process ended: {name}", "where": ""}
        first = stop if ended == 0 else reached + 1


def batch(run: Run, first: int, stop: int) -> tuple[list[dict[str, Any]], int | None, int]:
    """Run cases in one process: its findings, its exit code (None: it hung), and the last case it reached."""
    with tempfile.TemporaryDirectory(prefix="flipper-fuzz-") as folder, tempfile.TemporaryFile("w+") as output:
        progress = Path(folder, "progress")
        arguments = [run.corpus, run.kind, run.seed, first, stop, progress, run.keep]
        command = [sys.executable, HERE / "child.py", *map(str, arguments)]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, "TMPDIR": folder})
            try:
                code = _watched(process, progress)
            finally:
                process.kill()
                process.wait()
            reached = _reached(progress, first)
            if code not in (0, None) and code > 0:
                errors.seek(0)
                raise SystemExit(f"the fuzzer itself failed at case {reached}:\n{errors.read()[-3000:]}")
        for case in Path(folder).glob("*/case") if code != 0 else ():  # its maker died and could not keep it
            run.keep.mkdir(parents=True, exist_ok=True)
            shutil.move(case, run.keep / f"{run.kind}-{run.seed}-{reached}")
        output.seek(0)
        return [json.loads(line) for line in output if line.endswith("\n")], code, reached


def _watched(process: "subprocess.Popen[bytes]", progress: Path) -> int | None:
    seen, since = -1, time.monotonic()
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            pass
        if (now := _reached(progress, -1)) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALLED:
            return None


def _reached(progress: Path, otherwise: int) -> int:
    data = progress.read_bytes() if progress.exists() else b""
    return int.from_bytes(data, "little") if len(data) == 8 else otherwise


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="of each format; default 100,000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to run one again")
    parser.add_argument("--format", choices=(*FORMATS, "all"), default="all")
    keep = Path(tempfile.gettempdir(), "flipper-fuzz")
    parser.add_argument("--keep", type=Path, default=keep, help=f"where bad inputs go; default: {keep}")
    options = parser.parse_args()
    kinds = FORMATS if options.format == "all" else (options.format,)
    found = 0
    with tempfile.TemporaryDirectory(prefix="flipper-fuzz-") as folder:
        subprocess.run([sys.executable, HERE / "corpus.py", folder, *kinds], check=True)
        for kind in kinds:
            run = Run(kind, options.seed, Path(folder), options.keep.absolute())
            found += report(run, options.first, options.first + options.cases)
    return 3 if found else 0


def report(run: Run, first: int, last: int) -> int:
    """Run the cases of a format and print each kind of finding once; returns how many kinds there are."""
    start = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    injected = 0
    for finding in findings(run, first, last):
        if "injected" in finding:
            injected += finding["injected"]
            continue
        key = (finding["kind"], finding["where"])
        counts[key] += 1
        if counts[key] == 1:
            words = f"{finding['kind']} {finding['where']} {finding.get('message', '')}"
            print(f"{run.kind}: case {finding['case']}: {words}", flush=True)
    seconds = time.monotonic() - start
    found = f"{sum(counts.values())} findings of {len(counts)} kinds"
    print(
        f"{run.kind}: {last - first:,} cases in {seconds:.0f} s, {injected:,} still readable and struck; {found}",
        flush=True,
    )
    for (kind, where), count in counts.most_common():
        print(f"  {count:6} {kind} {where}")
    return len(counts)


if __name__ == "__main__":
    sys.exit(main())
