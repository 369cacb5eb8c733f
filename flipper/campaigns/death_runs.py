"""The runs of a campaign whose ranks die: each trial a training run in which they really do."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from flipper.campaigns.cells import Cell, Start, start_of, trial_seed
from flipper.campaigns.deaths import Strategy, deaths_of, job_of
from flipper.campaigns.folder import Campaign
from flipper.campaigns.listener import DeathListener, Listener
from flipper.campaigns.record import REFUSED, RunRecord
from flipper.campaigns.runs import clean_of, followed, golden_of, note_on, null_trial, parts, stored_golden, train_spec
from flipper.checkpoints.output import writing
from flipper.errors import EndedError
from flipper.failstop.kills import Kill
from flipper.failstop.run import train_through
from flipper.training.metrics import MetricsFile
from flipper.training.spec import Event, Watch

__all__ = ["clean_of", "golden_of", "note_on", "null_trial", "parts", "plan_key", "plan_of", "struck_trial"]


def plan_of(campaign: Campaign, cell: Cell, trial: int, clean: Path) -> tuple[Kill, ...]:
    """The deaths of a trial; clean: the checkpoint that it starts from, beside its golden run."""
    golden = stored_golden(clean.parent)
    first, last = golden.control.first_step + 1, golden.golden.last_step
    return deaths_of(cell.axes, trial_seed(campaign.spec, cell, trial), first, last, golden.buckets)


def plan_key(campaign: Campaign, start: Start, cell: Cell, plan: tuple[Kill, ...]) -> str:
    """None: equal deaths come to equal states, but not to equal times."""
    return ""


def struck_trial(
    campaign: Campaign, cell: Cell, trial: int, *, full: bool = False, keep: Path | None = None
) -> RunRecord:
    """One trial: resume from the clean checkpoint, lose ranks, recover as the cell says, and go on to the last step.

    full: it is an audit. keep: a folder for the metrics and the record. What the deaths do to the run is its result;
    raises EndedError for what they don't: another rank is lost than was to die, or the run doesn't even begin.
    """
    spec, start = campaign.spec, start_of(campaign.spec, cell, trial)
    golden = golden_of(campaign, start)
    kills = plan_of(campaign, cell, trial, golden.clean)
    strategy = Strategy.of(cell.axes, spec.save_every)
    with tempfile.TemporaryDirectory(prefix="flipper-trial-") as scratch:
        save = Path(scratch, "saved") if strategy.save_every else None
        watch = Watch(reference=golden.last, stop=False)
        run = train_spec(
            spec, cell.parallel, resume=golden.clean, watch=watch, save=save, save_every=strategy.save_every
        )
        job = job_of(cell.axes, run, strategy, kills)

        def work(hear: Listener) -> None:
            assert isinstance(hear, DeathListener)
            hear.inside = frozenset(kill.rank for kill in kills if kill.bucket is not None)
            if keep is None:
                train_through(job, hear)
                return
            with writing(keep):
                keep.mkdir(parents=True, exist_ok=True)
                (keep / "metrics.jsonl").unlink(missing_ok=True)
            with MetricsFile(keep / "metrics.jsonl") as file:

                def both(event: Event) -> None:
                    file.write(event)
                    hear(event)

                train_through(job, both)

        record = followed(
            spec, cell.parallel, golden, work, kind="audit" if full else "trial", training_seed=start.training_seed,
            cell=cell.number, trial=trial, seed=trial_seed(spec, cell, trial), deaths=list(map(str, kills)),
            struck=len(kills),
        )  # fmt: skip
    refuse_others(record, kills)
    if record.ended == REFUSED:  # nobody has died by then
        raise EndedError(f"a trial ended before its first step: {record.error}")
    if kills:  # evaluations before the first death are the golden run's
        record.first_step = (kills[0].step or 1) - 1
    if keep is not None:
        with writing(keep):
            (keep / "record.json").write_text(json.dumps({**record.summary(), **record.detail()}, indent=1), "utf-8")
    return record


def refuse_others(record: RunRecord, kills: tuple[Kill, ...]) -> None:
    """Raise EndedError where a rank was lost that was to live: that is no result of the trial's deaths."""
    meant = {kill.rank for kill in kills}
    if others := sorted({rank for rank, _, _ in record.lost} - meant):
        raise EndedError(f"rank {others[0]} was lost, which was not to die: somebody ended it, or memory ran out")
