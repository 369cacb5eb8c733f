"""The benchmark: each part makes its files, measures, prints rows and removes the files again."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import HEADER, Row, Usage, copy, flipper, run, show, skipped, work

INSPECTED = ("safetensors", "pytorch", "hdf5", "hdf5-gzip", "keras", "legacy", "dcp", "sharded")
COPIED = ("safetensors", "pytorch", "hdf5")


@dataclass(frozen=True)
class Sizes:
    """What the files measure, in MB, and how often what is noisy is repeated."""

    large: int = 2048
    small: int = 20
    datasets: int = 100
    tensors: int = 20_000
    faults: int = 10_000_000
    medium_faults: int = 1_000_000
    rounds: int = 5
    state: int = 500
    trials: int = 10_000


QUICK = Sizes(
    large=128, small=8, datasets=10, tensors=2000, faults=600_000, medium_faults=100_000, rounds=2, state=50,
    trials=1000,
)  # fmt: skip


@contextmanager
def made(folder: Path, kind: str, megabytes: int) -> Iterator[Path]:
    """A checkpoint of a format, for as long as the block runs."""
    path = folder / f"{kind}-{megabytes}"
    work("make", kind, path, megabytes)
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def start(folder: Path, sizes: Sizes) -> None:
    """The start of the command, against the start of Python."""
    rounds = 4 * sizes.rounds
    bare = min(run(sys.executable, "-c", "pass").cpu for _ in range(rounds))
    own = min(flipper("--help").cpu for _ in range(rounds))
    show([Row("flipper --help, CPU", own, "python -c pass", bare, 6)])
    code = (
        "import sys; before = set(sys.modules); import flipper.cli; new = {m.split('.')[0] for m in sys.modules} "
        "- {m.split('.')[0] for m in before}; print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    found = run(sys.executable, "-c", code, quiet=False).output.split()
    foreign = [name for name in found if name not in ("click", "flipper") and not name.startswith("__editable__")]
    show([Row(f"modules imported besides click: {', '.join(foreign) or 'none'}", 1 + len(foreign), "click", 1, 1, "")])


def inspect(folder: Path, sizes: Sizes) -> None:
    """CPU and memory of `flipper inspect` for each format."""
    for kind in INSPECTED:
        with made(folder, kind, sizes.large) as path:
            usages = [flipper("inspect", path) for _ in range(sizes.rounds)]
        cpu, memory = min(usage.cpu for usage in usages), max(usage.memory for usage in usages)
        name = f"inspect, {kind}, {sizes.large} MB"
        show([Row(f"{name}, CPU", cpu, "limit", 0.5), Row(f"{name}, peak memory", memory, "limit", 120, unit="MB")])


def tensors(folder: Path, sizes: Sizes) -> None:
    """A file of very many tensors."""
    path = folder / "many.pt"
    work("make_tensors", path, sizes.tensors)
    cpu = min(flipper("inspect", path).cpu for _ in range(sizes.rounds))
    show([Row(f"inspect, pytorch, {sizes.tensors:,} tensors, CPU", cpu, "limit", 1.5)])
    path.unlink()


def copies(folder: Path, sizes: Sizes) -> None:
    """One flip into a copy, against cp and against load-flip-save with the format's own library."""
    out = folder / "out"
    for kind in COPIED:
        with made(folder, kind, sizes.large) as path:
            pairs = [(copy(path, out), work("inject_copy", path, out, 2)) for _ in range(sizes.rounds)]  # by turns
            cp, own = (min(seconds) for seconds in zip(*pairs, strict=True))
            whole = min(_injected(path, out, "--count", 1).wall for _ in range(sizes.rounds))
            theirs = min(_rewritten(kind, path, out) for _ in range(2))
        name = f"{kind}, {sizes.large} MB, one flip into a copy"
        show([Row(name, own, "cp", cp, 1.1), Row(f"{name}, process", whole, "load-flip-save process", theirs, None)])


def _injected(source: Path, target: Path, *options: str | int) -> Usage:
    os.sync()
    usage = flipper("inject", source, "-o", target, "--seed", 7, "--quiet", *options)
    for path in target.parent.glob(f"{target.name}*"):
        path.unlink()
    return usage


def _rewritten(kind: str, source: Path, target: Path) -> float:
    os.sync()
    wall = run(sys.executable, Path(__file__).with_name("work.py"), "rewrite", kind, source, target).wall
    target.unlink()
    return wall


def reflink(folder: Path, sizes: Sizes) -> None:
    """One flip into a copy where the filesystem shares blocks."""
    for system in ("xfs", "btrfs"):
        what = f"one flip into a copy, {sizes.large} MB, {system}"
        try:
            room = 2 * sizes.large + 600
            with _mounted(folder, system, room) as inside, made(inside, "safetensors", sizes.large) as path:
                own = work("inject_copy", path, inside / "out", 4 * sizes.rounds)
            show([Row(what, own, "limit", 0.010)])
        except _NoFilesystem as error:
            skipped(what, str(error))


class _NoFilesystem(Exception):
    """A filesystem can't be made or mounted here."""


@contextmanager
def _mounted(folder: Path, system: str, megabytes: int) -> Iterator[Path]:
    """A fresh filesystem in a file, mounted through a loop device."""
    tool = shutil.which(f"mkfs.{system}", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is None or os.geteuid() != 0:
        raise _NoFilesystem(f"needs mkfs.{system}" if tool is None else "needs root, to mount an image")
    image, point = folder / f"{system}.img", folder / system
    image.touch()
    os.truncate(image, megabytes << 20)
    point.mkdir()
    try:
        for command in ([tool, "-q", str(image)], ["mount", "-o", "loop", str(image), str(point)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise _NoFilesystem(f"{command[0]}: {done.stderr.strip()[:100]}")
        try:
            yield point
        finally:
            subprocess.run(["umount", str(point)], check=True)
    finally:
        point.rmdir()
        image.unlink()


def in_place(folder: Path, sizes: Sizes) -> None:
    """One flip in place, which must not feel the size of the file."""
    for kind in COPIED:
        with made(folder, kind, sizes.small) as small, made(folder, kind, sizes.large) as large:
            os.sync()
            (few, few_unflushed), (many, unflushed) = work("inject_in_place", 8 * sizes.rounds, small, large)
        name = f"{kind}, one flip in place, {sizes.large} MB"
        rows = [
            Row(name, many, f"{sizes.small} MB", few, 2),
            Row(f"{name}, without flushes", unflushed, f"{sizes.small} MB", few_unflushed, 2),
        ]
        if kind != "hdf5":
            rows += [Row(name, many, "limit", 0.005), Row(f"{name}, without flushes", unflushed, "limit", 0.005)]
        show(rows)


def datasets(folder: Path, sizes: Sizes) -> None:
    """Very many faults in a file of moderate size: the case that the field's own tool is known for."""
    path = folder / "datasets.h5"
    work("make_datasets", path, 50, sizes.datasets)
    usages = [_injected(path, folder / "out", "--count", sizes.medium_faults) for _ in range(sizes.rounds)]
    path.unlink()
    name = f"{sizes.medium_faults:,} faults, hdf5, {sizes.datasets} MB, 50 datasets"
    cpu, memory = min(usage.cpu for usage in usages), max(usage.memory for usage in usages)
    show([Row(f"{name}, CPU", cpu, "limit", 2), Row(f"{name}, memory", memory, "limit", 300, unit="MB")])


def many(folder: Path, sizes: Sizes) -> None:
    """Faults that touch nearly every page of a large file.

    By turns and without a rest: so both sides write to memory that was freed a moment ago. After a second or two a
    virtual machine gives it back to its host, and to take it anew costs more than the copy itself.
    """
    out = folder / "out"
    for kind in COPIED:
        with made(folder, kind, sizes.large) as path:
            pairs = [(copy(path, out), _injected(path, out, "--count", sizes.faults)) for _ in range(sizes.rounds)]
        cp = min(seconds for seconds, _ in pairs)
        usages = [usage for _, usage in pairs]
        wall, cpu = (min(getattr(usage, name) for usage in usages) for name in ("wall", "cpu"))
        took = f"{cpu:.1f} s CPU, {max(usage.memory for usage in usages):.0f} MB peak"
        show([Row(f"{sizes.faults:,} faults, {kind}, {sizes.large} MB ({took})", wall, "cp", cp, 3)])


def peers(folder: Path, sizes: Sizes) -> None:
    """One flip in a live network of 11.8 million weights, against PyTorchFI, which is installed for that alone."""
    site = folder / "peer"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), "pytorchfi==0.6.0"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        skipped("one flip in a live network", f"pytorchfi 0.6.0 can't be installed: {done.stderr.strip()[-80:]}")
        return
    own, theirs = work("live", site, folder / "live.safetensors", 4 * sizes.rounds)
    show([Row("one flip in a live network, 47 MB, CPU", own, "PyTorchFI 0.6.0", theirs, None)])


def train(folder: Path, sizes: Sizes) -> None:
    """Training: a step's time, the pool, and a large state taken up again."""
    import training

    training.steps(folder, min(sizes.rounds, 3), 60 * sizes.rounds)
    training.trials(folder, sizes.rounds)
    training.resume(folder, sizes.rounds, sizes.state)


def campaign(folder: Path, sizes: Sizes) -> None:
    """Campaigns: what they add to training, workers, and thousands of stored trials."""
    import campaigns

    campaigns.added(folder, 4 * sizes.rounds + 1)
    campaigns.workers(folder, 4 * sizes.rounds + 1)
    campaigns.stored(folder, sizes.trials)


def failstop(folder: Path, sizes: Sizes) -> None:
    """Ranks that die: what the own reducer and its recoveries take, and the simulator."""
    import failstop as parts

    parts.reducer(folder, 2 * sizes.rounds + 1, 20 * sizes.rounds)
    parts.recoveries(folder, sizes.rounds)
    parts.simulator(folder, 200 * sizes.rounds)


def mesh(folder: Path, sizes: Sizes) -> None:
    """Allreduce round failed chips: planning, proof, a real sum."""
    import mesh as parts

    parts.planning(sizes.rounds)
    parts.sums(4 * sizes.rounds)


PARTS: dict[str, Callable[[Path, Sizes], None]] = {
    "start": start, "inspect": inspect, "tensors": tensors, "copies": copies, "reflink": reflink,
    "in-place": in_place, "datasets": datasets, "many": many, "train": train, "campaign": campaign,
    "failstop": failstop, "mesh": mesh,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure; default: all of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small files: shows that it works, not how fast it is")
    parser.add_argument("--peers", action="store_true", help="install PyTorchFI 0.6.0 for the run, and compare")
    parser.add_argument("--dir", type=Path, help="where the files go, 7 GB; default: the system's temporary folder")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    chosen = [PARTS[part] for part in options.parts or PARTS] + [peers] * options.peers
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the files go then too
    with tempfile.TemporaryDirectory(prefix="flipper-bench-", dir=options.dir) as folder:
        print(HEADER, flush=True)
        for part in chosen:
            part(Path(folder), QUICK if options.quick else Sizes())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; all files are removed")
