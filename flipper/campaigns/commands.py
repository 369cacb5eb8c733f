"""The runs of a campaign of commands: the user's own training, golden, control, null trials and struck trials."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flipper.campaigns.cells import Cell, Start, start_of
from flipper.campaigns.command_lines import files_of, missing_executable, places, split, words
from flipper.campaigns.command_run import (
    checkpoint_of,
    copy_clean,
    fingerprint,
    keep_place,
    log_of,
    metrics_asked,
    place_for,
    record_of,
    run_in,
)
from flipper.campaigns.folder import Campaign
from flipper.campaigns.kept import check_unchanged, content_of, is_unchanged, reading, signature
from flipper.campaigns.listener import fingerprint_id
from flipper.campaigns.metrics_files import blind_spot, complaint
from flipper.campaigns.record import RunRecord
from flipper.campaigns.runs import plan_digest, plan_of, struck_of
from flipper.campaigns.scratch import made_once
from flipper.campaigns.spec import Spec
from flipper.campaigns.states import state_of
from flipper.campaigns.weighting import weight_of
from flipper.checkpoints import open_checkpoint
from flipper.checkpoints.output import writing
from flipper.errors import CheckpointError, TrainingError, UsageError
from flipper.faults.plan import FaultPlan
from flipper.injection.inject import inject
from flipper.injection.recording import Record


@dataclass(frozen=True)
class Golden:
    """A golden run and its control. output: what the golden run left at {output}.

    checkpoint: what that was, as content_of tells; files: the same of those that the command line names, by name.
    """

    golden: RunRecord
    control: RunRecord
    output: Path | None
    checkpoint: dict[str, Any]
    files: dict[str, dict[str, Any]]


def clean_of(campaign: Campaign, start: Start, golden: RunRecord) -> Path:
    """The file that faults are drawn in."""
    return checkpoint_of(campaign.spec, start)


def golden_of(campaign: Campaign, start: Start) -> Golden:
    """The golden run of a command on this kind of machine, and its control; made where there is none.

    Raises UsageError where the command can't be run or its metrics can't be used, TrainingError where it fails.
    """
    machine = fingerprint(campaign.spec, start)
    home = campaign.folder.golden(fingerprint_id(machine), start.parallel, start.training_seed)
    record = home / "golden.json"
    if not record.exists():
        _check(campaign.spec, start)
        made_once(home, functools.partial(_make_golden, campaign, start, machine))
    with reading(record):
        found = _loaded(record, record.stat().st_mtime_ns)
    check_unchanged(checkpoint_of(campaign.spec, start), found.checkpoint)
    for name, then in found.files.items():
        check_unchanged(Path(campaign.spec.here, name), then)
    return found


@functools.lru_cache(maxsize=64)
def _loaded(path: Path, changed: int) -> Golden:
    document = json.loads(path.read_text("utf-8"))
    output = None if document["output"] is None else path.parent / document["output"]
    golden, control = RunRecord(**document["golden"]), RunRecord(**document["control"])
    return Golden(golden, control, output, document["checkpoint"], document.get("files", {}))


def _check(spec: Spec, start: Start) -> None:
    """What would make every run fail."""
    problem = missing_executable(_first_word(spec, start), Path(spec.here))
    if problem is not None:
        raise UsageError(f"commands.{start.parallel}: {problem}")
    open_checkpoint(checkpoint_of(spec, start)).close()


def _first_word(spec: Spec, start: Start) -> str:
    values = dict.fromkeys(places(spec.commands[start.parallel]), "")
    return words(split(spec.commands[start.parallel])[0], values, Path(spec.here))[0]


def _make_golden(campaign: Campaign, start: Start, machine: dict[str, str], folder: Path) -> None:
    """Run golden and control, and keep their records and the golden run's output in the folder."""
    source, metrics = checkpoint_of(campaign.spec, start), metrics_asked(campaign.spec)
    before = signature(source)
    here = Path(campaign.spec.here)
    named = {name: here / name for name in files_of(campaign.spec.commands[start.parallel], here)}
    files = {name: content_of(path) for name, path in named.items()}
    golden = _clean_run(campaign, start, "golden", folder)
    output = next((folder / "output").iterdir(), None) if (folder / "output").exists() else None
    control = _clean_run(campaign, start, "control", None, golden, output)
    if signature(source) != before:
        raise UsageError(f"{source} has changed while a command ran that was given a copy of it")
    document = {
        "machine": machine,
        "metrics": metrics.format,
        "checkpoint": content_of(source),
        "files": {name: files[name] for name, path in named.items() if is_unchanged(path, files[name])},  # logs change
        "output": None if output is None else str(output.relative_to(folder)),
        "golden": {**golden.summary(), **golden.detail()},
        "control": {**control.summary(), **control.detail()},
    }
    (folder / "golden.json").write_text(json.dumps(document), "utf-8")


def _clean_run(
    campaign: Campaign,
    start: Start,
    kind: str,
    keep: Path | None,
    golden: RunRecord | None = None,
    output: Path | None = None,
) -> RunRecord:
    """A golden or control run, which has to end well. keep: where its output goes."""
    metrics = metrics_asked(campaign.spec)
    with place_for(campaign.spec, start) as place:
        copy_clean(campaign.spec, start, place)
        log = log_of(campaign, start, kind)
        ran = run_in(campaign.spec, start, place, start.training_seed, output, log)
        who = f"the {kind} run of commands.{start.parallel}"
        if ran.error is not None:
            raise TrainingError(f"{who} failed: {ran.error}; all that it wrote is in {log}")
        problem = complaint(metrics, ran.series)
        if problem is None and metrics.format == "stdout":
            problem = blind_spot(metrics, place.log.read_text("utf-8", "replace"))
        if problem is not None:
            raise UsageError(f"{who} can't be used: {problem}")
        if "output" in places(campaign.spec.commands[start.parallel]):
            if ran.state is None:
                _say_why(who, place.output)
            if keep is not None:
                (keep / "output").mkdir()
                with writing(keep):
                    shutil.move(place.output, keep / "output" / place.name)
        return record_of(campaign.spec, start, ran, golden, kind=kind)


def _say_why(who: str, output: Path) -> None:
    """Raise what is wrong with the output of a run."""
    try:
        state_of(output)
    except CheckpointError as error:
        raise CheckpointError(error.reason, f"{who} can't be used: {error.message}") from error
    except UsageError as error:
        raise UsageError(f"{who} can't be used: {error}") from error


def parts(golden: RunRecord, control: RunRecord) -> str | None:
    """Where a command's control leaves its golden run; None where it doesn't."""
    for what, mine, others in (("loss", golden.steps, control.steps), ("metric", golden.evals, control.evals)):
        for one, other in itertools.zip_longest(mine, others):
            if repr(tuple(one or ())) != repr(tuple(other or ())):  # NaN equals NaN
                step = (one or other)[0]
                at = 1 if what == "loss" else 2
                return f"at step {step} its {what} is {_told(one, at)} and in the control {_told(other, at)}"
    if golden.state_digest != control.state_digest:
        return "it told the same as the control, but their outputs differ"
    return None


def note_on(spec: Spec, golden: RunRecord, control: RunRecord) -> str | None:
    """What the user should hear of a command by its control; None where all is well."""
    who = f"commands.{golden.parallel}"
    if (problem := parts(golden, control)) is not None:
        return (
            f"{who} is not deterministic: its control differs from its golden run, {problem}; trials go on, but none "
            "can come out identical, and what the null trials differ by is the band"
        )
    if spec.tolerance is None and spec.null_trials and "seed" not in places(spec.commands[golden.parallel]):
        return (
            f"{who} is deterministic and has no {{seed}}: its null trials repeat the control, so its band is 0 wide; "
            "pass {seed} on, or give campaign.tolerance"
        )
    return None


def _told(row: Any, at: int) -> str:
    return "not told" if row is None else repr(row[at])


def null_trial(campaign: Campaign, start: Start, number: int) -> RunRecord:
    """A clean run: with another seed where the command takes one, else the control once more."""
    golden, seed = golden_of(campaign, start), start.training_seed
    if "seed" in places(campaign.spec.commands[start.parallel]):
        digest = hashlib.sha256(f"{campaign.spec.seed}\0null\0{seed}\0{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little") >> 1  # numpy and C take no more than 31 or 32 bits
    with place_for(campaign.spec, start) as place:
        copy_clean(campaign.spec, start, place)
        ran = run_in(campaign.spec, start, place, seed, golden.output, log_of(campaign, start, f"null{number}"))
        return record_of(campaign.spec, start, ran, golden.golden, kind="null", trial=number, seed=seed)


def plan_key(campaign: Campaign, start: Start, cell: Cell, plan: FaultPlan) -> str:
    """Equal for trials whose runs are the same where the command is deterministic."""
    return plan_digest((start,), plan)


def struck_trial(
    campaign: Campaign, cell: Cell, trial: int, *, full: bool = False, keep: Path | None = None
) -> RunRecord:
    """One trial: strike a copy of the checkpoint, and run the command on it.

    full: it is an audit. keep: a folder for the altered checkpoint, its manifest, the metrics and the log. Raises
    OutputError where the disk fails, TrainingError where the machine does; what the faults do is the trial's result.
    """
    start = start_of(campaign.spec, cell, trial)
    golden, source = golden_of(campaign, start), checkpoint_of(campaign.spec, start)
    plan = plan_of(campaign, cell, trial, source)
    with place_for(campaign.spec, start) as place:
        manifest = inject(source, place.checkpoint, plan, record=Record(path=place.manifest))
        kind = "audit" if full else "trial"
        log = campaign.folder.log(f"cell{cell.number}-{kind}{trial}")
        ran = run_in(campaign.spec, start, place, start.training_seed, golden.output, log)
        record = record_of(
            campaign.spec, start, ran, golden.golden, kind=kind, cell=cell.number, trial=trial, seed=plan.seed,
            plan=plan_key(campaign, start, cell, plan) if parts(golden.golden, golden.control) is None else "",
            weight=weight_of(source, cell.model, plan), **struck_of(manifest),
        )  # fmt: skip
        if keep is not None:
            keep_place(place, keep, record)
    return record
