"""The runs of a recipe's campaign: golden, control, null trials and struck trials, each a training run."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.cells import Cell, Start, effective_reach, start_of, trial_seed
from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.folder import Campaign
from flipper.campaigns.kept import check_unchanged, content_of, is_unchanged, reading
from flipper.campaigns.listener import Listener, fingerprint_id, listener_of
from flipper.campaigns.record import CRASH, HANG, IDENTICAL, REFUSED, RunRecord
from flipper.campaigns.scratch import check_room, made_once
from flipper.campaigns.spec import Spec
from flipper.campaigns.weighting import weight_of
from flipper.errors import (
    CheckpointError,
    EndedError,
    HangError,
    MismatchError,
    RecipeError,
    StartError,
    TrainingError,
    UsageError,
)
from flipper.failstop.counting import bucket_count
from flipper.failstop.run import train_through
from flipper.failstop.spec import FailstopSpec
from flipper.faults.draw import draw
from flipper.faults.plan import FaultPlan
from flipper.injection.inject import inject
from flipper.injection.manifest import Manifest
from flipper.training.faults_file import LiveFaults
from flipper.training.fingerprint import machine_fingerprint
from flipper.training.layouts import Parallel
from flipper.training.recipes import user
from flipper.training.run import train
from flipper.training.spec import SUFFIXES, TrainSpec, Watch

FAULTS_KEPT: Final = 1000
"""Faults of a trial that are stored one by one."""

SLOWER: Final = 20.0
"""How many times as long as its golden run a trial may take before it counts as hung."""


@dataclass(frozen=True)
class Golden:
    """A golden run and its control, and the files that trials start from and are measured by.

    clean: the checkpoint that is altered. last: the final one. digests: step -> resume digest on the way. buckets: that
    gradients are averaged in, where ranks are to die. files: what those two were when they were made, by name. recipe:
    what the file of a user's recipe was.
    """

    golden: RunRecord
    control: RunRecord
    clean: Path
    last: Path
    digests: Mapping[int, str]
    buckets: int = 0
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    recipe: dict[str, Any] | None = None


def golden_of(campaign: Campaign, start: Start) -> Golden:
    """The golden run of a layout and training seed on this kind of machine, made if there is none; and its control.

    Raises TrainingError when a run fails, or when the control differs: then no trial would mean anything.
    """
    machine = machine_fingerprint(campaign.spec.device)
    return _golden(campaign, fingerprint_id(machine), start.parallel, start.training_seed)


def clean_of(campaign: Campaign, start: Start, golden: RunRecord) -> Path:
    """The file that faults are drawn in: the one that a golden run has left."""
    return stored_golden(campaign.folder.golden(golden.fingerprint, start.parallel, start.training_seed)).clean


@functools.lru_cache(maxsize=64)
def _loaded(path: Path, changed: int) -> Golden:
    document = json.loads(path.read_text("utf-8"))
    clean, last = (path.parent / document[name] for name in ("clean", "last"))
    digests = {int(step): digest for step, digest in document["digests"].items()}
    runs = RunRecord(**document["golden"]), RunRecord(**document["control"])
    buckets, files, recipe = document.get("buckets", 0), document.get("files", {}), document.get("recipe")
    return Golden(*runs, clean, last, digests, buckets, files, recipe)


def _golden(campaign: Campaign, machine: str, parallel: str, seed: int) -> Golden:
    home = campaign.folder.golden(machine, parallel, seed)
    record = home / "golden.json"
    if not record.exists():
        made_once(home, functools.partial(_make_golden, campaign.spec, parallel, seed))  # another's are the same bits
    found, recipe = stored_golden(home), _recipe_file(campaign.spec)
    if recipe is not None and found.recipe is not None:
        check_unchanged(recipe, found.recipe)
    return found


def _recipe_file(spec: Spec) -> Path | None:
    """The file of a user's own recipe; None of one that is built in."""
    return user.split(spec.recipe)[0] if spec.recipe is not None and user.is_meant(spec.recipe) else None


def stored_golden(home: Path) -> Golden:
    """The golden run that lies in a folder, and its control; UsageError where they are not as they were left."""
    record = home / "golden.json"
    with reading(record):
        found = _loaded(record, record.stat().st_mtime_ns)
        for name, then in found.files.items():
            if not is_unchanged(home / name, then):
                raise ValueError(f"{name} is no longer what it was")
    return found


def _make_golden(spec: Spec, parallel: str, seed: int, folder: Path) -> None:
    """Run golden and control, and keep their record, the clean checkpoint and the last one in the folder."""
    whole, recipe = folder / "whole", _recipe_file(spec)
    made_from = None if recipe is None else content_of(recipe)
    base = train_spec(spec, parallel, seed=seed, save=whole, watch=Watch(stop=False))
    if at_start := not (spec.inject_step or spec.inject_epoch):
        _train(spec, replace(base, steps=0, epochs=None, watch=None), Listener(spec.metric))
    hear = listener_of(spec)
    _train(spec, replace(base, save_every=spec.inject_step or 0, save_epoch=spec.inject_epoch or None), hear)
    golden = hear.record("golden", parallel, seed)
    suffix = SUFFIXES[spec.checkpoint_format]
    struck_at = 0 if at_start else spec.inject_step or min(hear.saved)
    clean, last = (folder / f"{name}{suffix}" for name in ("clean", "last"))
    (whole / f"step-{struck_at:06d}{suffix}").rename(clean)
    (whole / f"step-{golden.last_step:06d}{suffix}").rename(last)
    shutil.rmtree(whole)
    told = listener_of(spec)
    asked = frozenset() if spec.fault == RANK_LOSS else _asked(struck_at, golden.last_step)
    _train(spec, train_spec(spec, parallel, resume=clean, watch=Watch(asked, reference=last, stop=False)), told)
    control = told.record("control", parallel, seed)
    if (problem := parts(golden, control)) is not None:
        raise TrainingError(
            f"the control differs from the golden run under {parallel}, training seed {seed}: {problem}. "
            "Trials would show that difference and not the faults'; make training deterministic first"
        )
    document = {
        "machine": hear.events["start"]["fingerprint"],
        "clean": clean.name,
        "last": last.name,
        "files": {path.name: content_of(path) for path in (clean, last)},
        "recipe": made_from,
        "digests": told.digests,
        "buckets": _buckets(spec, parallel),
        "golden": {**golden.summary(), **golden.detail()},
        "control": {**control.summary(), **control.detail()},
    }
    (folder / "golden.json").write_text(json.dumps(document), "utf-8")


def _train(spec: Spec, run: TrainSpec, hear: Listener, limit: float | None = None) -> None:
    """Make a run as the campaign's trials are made: where their ranks die, by what sees to that."""
    if spec.fault == RANK_LOSS:
        train_through(FailstopSpec(run), hear)
    else:
        train(run, hear, limit=limit)


def _buckets(spec: Spec, parallel: str) -> int:
    """Those that a rank may die in."""
    assert spec.recipe is not None
    overlapped = spec.fault == RANK_LOSS and FailstopSpec(train_spec(spec, parallel, seed=0)).overlapped
    return bucket_count(spec.recipe) if overlapped else 0


def _asked(start: int, end: int) -> frozenset[int]:
    """The steps after which a trial is compared with its golden run: 1, 2, 4, 8 ... after the strike."""
    return frozenset(start + (1 << power) for power in range(64) if start + (1 << power) < end)


def parts(golden: RunRecord, control: RunRecord) -> str | None:
    """Where the control leaves the golden run; None where it doesn't."""
    later = [each for each in golden.steps if each[0] > control.first_step]
    for mine, other in zip(later, control.steps, strict=False):
        if tuple(mine) != tuple(other):
            return f"at step {mine[0]} the loss is {mine[1]!r} and in the control {other[1]!r}"
    if (golden.state_digest, golden.resume_digest) != (control.state_digest, control.resume_digest):
        return f"the losses are equal, but the states after step {golden.last_step} are not"
    return None


def note_on(spec: Spec, golden: RunRecord, control: RunRecord) -> str | None:
    """What the user should hear of a control that lets the campaign go on: nothing, for it equals its golden run."""
    return None


def train_spec(spec: Spec, parallel: str, **values: Any) -> TrainSpec:
    """A run of the campaign, without faults."""
    assert spec.recipe is not None
    layout = Parallel.parse(parallel)
    return TrainSpec(
        spec.recipe,
        layout,
        steps=spec.steps,
        epochs=spec.epochs,
        device=spec.device,
        timeout=spec.timeout,
        data_dir=None if spec.data_dir is None else Path(spec.data_dir),
        checkpoint_format=spec.checkpoint_format,
        evaluate_every=spec.evaluate_every,
        probe_every=spec.probe_every if layout.replicated else 0,
        detect=tuple(name for name in spec.detect if name != "replicas" or layout.replicated),
        **values,
    )


def null_trial(campaign: Campaign, start: Start, number: int) -> RunRecord:
    """A clean run resumed like a trial, with another data order and other generators: what chance alone does."""
    spec = campaign.spec
    golden, seed = golden_of(campaign, start), start.training_seed
    digest = hashlib.sha256(f"{spec.seed}\0null\0{seed}\0{number}".encode()).digest()
    other = int.from_bytes(digest[:8], "little")
    watch = Watch(reference=golden.last, stop=False)
    run = train_spec(spec, start.parallel, resume=golden.clean, seed=other, watch=watch)
    return _followed(spec, run, golden, kind="null", training_seed=seed, trial=number, seed=other)


def plan_of(campaign: Campaign, cell: Cell, trial: int, clean: Path) -> FaultPlan:
    """The faults of a trial, drawn in a clean checkpoint."""
    if campaign.spec.census:
        from flipper.campaigns.census import nth_bit

        return nth_bit(clean, cell.model, trial)
    return draw(clean, cell.model, trial_seed(campaign.spec, cell, trial))


def plan_key(campaign: Campaign, start: Start, cell: Cell, plan: FaultPlan) -> str:
    """Equal for trials whose runs are the same: equal faults in equal copies under one layout and training seed."""
    return plan_digest((cell.parallel, effective_reach(cell.parallel, cell.reach), start.training_seed), plan)


def plan_digest(where: tuple[Any, ...], plan: FaultPlan) -> str:
    """A short digest over the faults of a plan and where they are made."""
    digest = hashlib.sha256(repr((*where, [target.name for target in plan.targets])).encode())
    for column in (plan.target, plan.flat, plan.op, plan.mask, plan.value):
        digest.update(column.astype("uint64").tobytes())
    return digest.hexdigest()[:32]


def struck_trial(
    campaign: Campaign, cell: Cell, trial: int, *, full: bool = False, keep: Path | None = None
) -> RunRecord:
    """One trial: strike the clean checkpoint, resume from it, and compare with the golden run on the way.

    full: go on to the last step even where the future is known. keep: a folder for the altered checkpoint, its manifest
    and the metrics. Raises OutputError where the disk fails; what the faults do to the run is its result.
    """
    spec, start = campaign.spec, start_of(campaign.spec, cell, trial)
    golden, seed = golden_of(campaign, start), start.training_seed
    plan = plan_of(campaign, cell, trial, golden.clean)
    reach = effective_reach(cell.parallel, cell.reach)
    with tempfile.TemporaryDirectory(prefix="flipper-trial-") as scratch:
        altered = Path(scratch, golden.clean.name)
        manifest = inject(golden.clean, altered, plan)
        watch = Watch(golden=golden.digests, reference=golden.last, stop=not full)
        run = train_spec(spec, cell.parallel, resume=altered, watch=watch)
        if reach != "all":
            live = LiveFaults(plan, None, plan.seed or 0)
            run = replace(run, resume=golden.clean, inject=live, at=golden.control.first_step, reach=reach)
        record = _followed(
            spec, run, golden, kind="audit" if full else "trial", training_seed=seed, cell=cell.number, trial=trial,
            seed=plan.seed, reach=reach, plan=plan_key(campaign, start, cell, plan),
            weight=weight_of(golden.clean, cell.model, plan), **struck_of(manifest),
        )  # fmt: skip
        if keep is not None:
            _keep(Path(scratch), keep, record)
    return record


def _followed(spec: Spec, run: TrainSpec, golden: Golden, **values: Any) -> RunRecord:
    """Train, and make a record of it."""
    limit = spec.timeout + SLOWER * max(golden.golden.seconds, golden.control.seconds, 1.0)
    return followed(spec, str(run.parallel), golden, lambda hear: _train(spec, run, hear, limit), **values)


def followed(
    spec: Spec, parallel: str, golden: Golden, work: Callable[[Listener], object], **values: Any
) -> RunRecord:
    """Do the work, a run that tells the listener its events, and make a record of it even where it fails.

    Not where it was ended, the machine lacked something, or the recipe can't be loaded any more.
    """
    hear = listener_of(spec)
    ended, error = None, None
    try:
        work(hear)
    except (EndedError, StartError, RecipeError):
        raise
    except (TrainingError, MismatchError, CheckpointError, UsageError) as failure:
        if isinstance(failure, UsageError) and hear.started:
            raise
        check_room()
        ended = REFUSED if not hear.started else HANG if isinstance(failure, HangError) else CRASH
        error = str(failure)
    record = hear.record(parallel=parallel, ended=ended, error=error, **values)
    record.fingerprint = record.fingerprint or golden.golden.fingerprint  # refused before it told its own
    if record.ended == IDENTICAL:
        _finish_as(record, golden.golden)
    return record


def _finish_as(record: RunRecord, golden: RunRecord) -> None:
    """The rest of a run that met its golden run: the golden run's."""
    met = record.last_step
    record.evals += [(step, loss, metric) for step, loss, metric in golden.evals if step > met]
    record.loss, record.metric = golden.loss, golden.metric
    record.state_digest, record.resume_digest = golden.state_digest, golden.resume_digest
    record.max_abs_parameter, record.nonfinite = golden.max_abs_parameter, golden.nonfinite
    record.state_distance = 0.0


def struck_of(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says of the faults, for a record."""
    rows = manifest.table.rows()
    kept = [row for row, _ in zip(rows, range(FAULTS_KEPT), strict=False)]
    return {
        "faults": [(r["tensor"], r["flat"], r["bits"], r["before_value"], r["after_value"]) for r in kept],
        "struck": len(manifest.table),
        "population": (manifest.population or {}).get("bits", 0),
        "struck_nonfinite": sum(not _finite(row["after_value"]) for row in kept),
    }


def _finite(value: Any) -> bool:
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _keep(scratch: Path, keep: Path, record: RunRecord) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    for file in scratch.iterdir():
        shutil.copy2(file, keep / file.name)
    (keep / "record.json").write_text(json.dumps({**record.summary(), **record.detail()}, indent=1), "utf-8")
