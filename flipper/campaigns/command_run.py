"""Command runs: one run of the user's own training, in a folder of its own, on a copy of the checkpoint."""

from __future__ import annotations

import functools
import glob
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import Start
from flipper.campaigns.command_lines import places, words
from flipper.campaigns.folder import Campaign
from flipper.campaigns.listener import fingerprint_id
from flipper.campaigns.metrics_files import Metrics, Series, aligned, metrics_of, read_series
from flipper.campaigns.process_tree import Ended, run_command
from flipper.campaigns.record import COMPLETED, CRASH, HANG, REFUSED, RunRecord
from flipper.campaigns.scratch import check_room
from flipper.campaigns.spec import Spec
from flipper.campaigns.states import State, state_of
from flipper.checkpoints.output import writing
from flipper.errors import CheckpointError, EndedError, FlipperError, OutputError, TrainingError, UsageError
from flipper.injection.copying import copy
from flipper.training.fingerprint import processor
from flipper.training.launch import ASKING, LONGEST_FOLDER

LOG_KEPT: Final = 1 << 20
"""Bytes of a failed run's log that are kept, from its end."""

_NOT_THE_FAULTS: Final[dict[str, tuple[type[FlipperError], str]]] = {
    "address already in use": (
        TrainingError,
        "its port is taken: runs that fix a port can't run side by side; let it choose one (torchrun --standalone), or "
        "use --workers 1",
    ),
    "no space left on device": (OutputError, "no space left where it writes; runs have their folders in {}"),
}
"""What a failed run may write for reasons that are not in its checkpoint, and what is raised and said then."""


@dataclass(frozen=True)
class Place:
    """The folder of one run, and what lies where in it.

    name: the checkpoint's own, which altered copy and output have too: programs go by suffixes. metrics_suffix: of
    the file of metrics.
    """

    folder: Path
    name: str
    metrics_suffix: str

    @property
    def checkpoint(self) -> Path:
        """What the command resumes from."""
        return self.folder / "checkpoint" / self.name

    @property
    def output(self) -> Path:
        """Where the command may leave its last checkpoint."""
        return self.folder / "output" / self.name

    @property
    def work(self) -> Path:
        """The command's working folder."""
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        """For temporary files of the command: launchers leave some behind."""
        return self.folder / "tmp"

    @property
    def metrics(self) -> Path:
        """Where the command may write metrics."""
        return self.folder / f"metrics.{self.metrics_suffix}"

    @property
    def log(self) -> Path:
        """What the command prints, on stdout and stderr."""
        return self.folder / "log"

    @property
    def manifest(self) -> Path:
        """The record of the faults."""
        return self.folder / "manifest.json"


@dataclass(frozen=True)
class Ran:
    """What a command came to. error: in words, None where it ended well. state: of its output."""

    ended: str
    error: str | None
    series: Series
    state: State | None
    seconds: float


def fingerprint(spec: Spec, start: Start) -> dict[str, str]:
    """What a command's results depend on beside its seed, as far as that can be told from outside of it."""
    return {
        "cpu": processor(),
        "gpu": _gpus(),
        "threads": str(spec.threads),
        "command": spec.commands[start.parallel],
        "checkpoint": start.checkpoint or "",
        "settings": start.setting,
    }


@functools.cache
def _gpus() -> str:
    """The models of NVIDIA's devices, as the driver gives them."""
    models = set()
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        with open(path, encoding="utf-8", errors="replace") as file:
            models |= {line.partition(":")[2].strip() for line in file if line.startswith("Model:")}
    return ", ".join(sorted(models))


def checkpoint_of(spec: Spec, start: Start) -> Path:
    """The user's checkpoint, which is only ever read."""
    assert start.checkpoint is not None
    return Path(spec.here, start.checkpoint)


@contextmanager
def place_for(spec: Spec, start: Start) -> Iterator[Place]:
    """A fresh folder for a run, which is gone after it."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        place = Place(Path(folder), checkpoint_of(spec, start).name, metrics_asked(spec).format)
        with writing(place.folder):
            for made in (place.checkpoint.parent, place.output.parent, place.work, place.temporary):
                made.mkdir()
        yield place


def copy_clean(spec: Spec, start: Start, place: Place) -> None:
    """Put an unaltered copy of the checkpoint in its place."""
    source = checkpoint_of(spec, start)
    with writing(place.checkpoint):
        if source.is_dir():
            shutil.copytree(source, place.checkpoint)
        else:
            place.checkpoint.touch()
            copy(source, place.checkpoint)


def run_in(spec: Spec, start: Start, place: Place, seed: int, reference: Path | None, log: Path) -> Ran:
    """Run the command on the checkpoint in its place, and read what it has left there.

    reference: what its output is compared with. log: where what it printed is kept if it fails. Raises
    OutputError and TrainingError where the machine is to blame, EndedError where somebody ended it.
    """
    values = {
        "checkpoint": str(place.checkpoint), "metrics": str(place.metrics), "output": str(place.output),
        "workdir": str(place.work), "seed": str(seed), "parallel": start.parallel, **dict(start.settings),
    }  # fmt: skip
    line, metrics = spec.commands[start.parallel], metrics_asked(spec)
    ended = run_command(
        words(line, values, Path(spec.here)),
        cwd=place.work,
        log=place.log,
        timeout=spec.timeout,
        scratch=place.folder,
        env=_environment(spec, place),
    )
    if ended.code is not None and -ended.code in ASKING:
        raise EndedError(f"{words(line, values, Path(spec.here))[0]} was {ended.manner}: somebody ended it")
    series = read_series(metrics, _metrics_files(metrics, place), whole=ended.code == 0)
    _keep_log(place, log, ended.code != 0 or series.empty)
    what, error = _judged(ended, series, place)
    state = None
    if what == COMPLETED and "output" in places(line):
        try:
            state = state_of(place.output, reference)
        except (CheckpointError, UsageError):
            state = None  # a trial without its output is judged by its metrics
    return Ran(what, error, series, state, ended.seconds)


def _environment(spec: Spec, place: Place) -> dict[str, str]:
    """What is set for a command: threads, since sums change with them; output at once, which a kill would lose.

    Its temporary files go with its folder, unless that would be too long for the name of a socket.
    """
    usual = {"OMP_NUM_THREADS": str(spec.threads), "PYTHONUNBUFFERED": "1"}
    return usual if len(str(place.temporary)) > LONGEST_FOLDER else {**usual, "TMPDIR": str(place.temporary)}


def metrics_asked(spec: Spec) -> Metrics:
    """The table [metrics] of a campaign."""
    return metrics_of(spec.metrics, spec.metric)


def _metrics_files(metrics: Metrics, place: Place) -> list[Path]:
    if metrics.format == "stdout":
        return [place.log]
    return [place.metrics] if metrics.file is None else sorted(place.work.glob(metrics.file))


def _judged(ended: Ended, series: Series, place: Place) -> tuple[str, str | None]:
    """What a run has ended as, and why in words. Raises OutputError, TrainingError where the machine is to blame."""
    if ended.code is None:
        return HANG, f"{ended.manner} (campaign.timeout)"
    if ended.code == 0 and not series.empty:
        return COMPLETED, None
    said = _last_written(place.log)
    if ended.code == 0:
        return REFUSED, f"exit code 0, but it told of no step; it last wrote: {_last_words(said)}"
    for sign, (kind, meaning) in _NOT_THE_FAULTS.items():
        if sign in said.lower():
            raise kind(f"a command failed ({ended.manner}): {meaning.format(place.folder.parent)}")
    check_room()
    return REFUSED if series.empty else CRASH, f"{ended.manner}; it last wrote: {_last_words(said)}"


def _last_written(log: Path, most: int = 1 << 16) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        return file.read().decode("utf-8", "replace")


def _last_words(said: str, most: int = 2) -> str:
    """The last line that looks like an exception, else the last lines: launchers write much after the cause."""
    lines = [line.strip()[:300] for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(^|\s)[\w.]*(Error|Exception)\b: ", line)]
    return errors[-1] if errors else " | ".join(lines[-most:]) or "nothing"


def record_of(spec: Spec, start: Start, ran: Ran, golden: RunRecord | None, *, kind: str, **values: Any) -> RunRecord:
    """The record of a run; golden: the run that it is compared with, None for that itself."""
    series, state = ran.series, ran.state
    usual = {} if golden is None else {step: metric for step, _, metric in golden.evals}
    evals = aligned(series, usual, ran.ended == COMPLETED)
    told = min((*series.steps, *series.evals), default=1)
    first = spec.inject_step if spec.inject_step is not None else series.first
    return RunRecord(
        kind,
        start.parallel,
        start.training_seed,
        checkpoint=start.checkpoint,
        settings=start.setting,
        fingerprint=fingerprint_id(fingerprint(spec, start)),
        ended=ran.ended,
        error=ran.error,
        first_step=golden.first_step if golden is not None else told - 1 if first is None else first,
        last_step=series.last_step,
        steps=[(step, loss, norm) for step, (loss, norm) in series.steps.items()],
        evals=[(step, loss, metric) for step, (loss, metric) in evals.items()],
        replicas=series.replicas,
        detected=series.detected,
        loss=series.loss,
        metric=next(reversed(evals.values()))[1] if evals else None,
        max_abs_parameter=None if state is None else state.max_abs_parameter,
        nonfinite=None if state is None else state.nonfinite,
        state_distance=None if state is None else state.distance,
        state_digest="" if state is None else state.digest,
        resume_digest="" if state is None else state.digest,
        seconds=ran.seconds,
        **values,
    )


def log_of(campaign: Campaign, start: Start, what: str) -> Path:
    """Where the log of a clean run that failed is kept."""
    machine = fingerprint_id(fingerprint(campaign.spec, start))
    return campaign.folder.log(f"{what}-{start.parallel}-seed{start.training_seed}-{machine}")


def _keep_log(place: Place, log: Path, failed: bool) -> None:
    """Keep a failed run's log, of a long one the end; of one that ended well nothing, an earlier one neither."""
    if not failed:
        log.unlink(missing_ok=True)
        return
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(_last_written(place.log, LOG_KEPT), "utf-8")


def keep_place(place: Place, keep: Path, record: RunRecord) -> None:
    """Keep checkpoint, manifest, metrics, log and record of a trial."""
    with writing(keep):
        keep.mkdir(parents=True, exist_ok=True)
        for entry in place.folder.iterdir():
            if entry in (place.work, place.output.parent, place.temporary):
                continue
            if entry.is_dir():
                shutil.copytree(entry, keep / entry.name, dirs_exist_ok=True)
            else:
                shutil.copy2(entry, keep / entry.name)
        (keep / "record.json").write_text(json.dumps({**record.summary(), **record.detail()}, indent=1), "utf-8")
