"""merge: join the results of a campaign's shards, and of other folders, into its one database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flipper.campaigns.folder import Campaign, difference, open_campaign, write
from flipper.campaigns.record import KINDS, RunRecord
from flipper.campaigns.store import Store
from flipper.errors import UsageError

Identity = tuple[Any, ...]

COMPARED: Final = ("plan", "seed", "state_digest", "resume_digest", "loss", "metric")
"""What two results of one trial, on one kind of machine, must agree in."""


@dataclass(frozen=True)
class Source:
    """A database to join. numbers: the campaign's number of each of its cells."""

    path: Path
    numbers: Mapping[int, int]


@dataclass
class Joined:
    """What a database held, by kind of run, and how many runs of it are new in the joined one."""

    path: Path
    held: Counter[str] = field(default_factory=Counter)
    new: int = 0


def merge(campaign: Campaign, others: Sequence[Path] = ()) -> list[Joined]:
    """Join what the shards of a campaign's folder and other folders hold; once more it adds what has come since.

    others: folders of campaigns with the same spec, where trials, axis values and thresholds may differ. A trial that
    is there already stays as it is, also where another kind of machine has made it again.
    Raises UsageError when specs, or two results of one trial on one kind of machine, contradict each other; then
    nothing is changed.
    """
    sources = _sources(campaign, others)
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(source.path)) for source in sources]
        target = stack.enter_context(Store(campaign.folder.results(), write=True))
        known = _Known()
        for record in target.runs(*KINDS):
            known.add(record, campaign.folder.results())
        joined, chosen = [], []
        for source, store in zip(sources, stores, strict=True):
            told, new = Joined(source.path), set()
            for record in store.runs(*KINDS):
                told.held[record.kind] += 1
                if known.add(_renumbered(record, source), source.path):
                    new.add(_key(record))
            told.new = len(new)
            joined.append(told)
            chosen.append(new)
        write(campaign)
        target.join(_records(sources, stores, chosen), _seconds(target, sources, stores))
    return joined


class _Known:
    """The runs that are there, and where each is from."""

    def __init__(self) -> None:
        self._found: dict[Identity, tuple[RunRecord, Path]] = {}

    def add(self, record: RunRecord, path: Path) -> bool:
        """Take in a run, unless it is there; whether it wasn't. UsageError when the one there contradicts it."""
        identity = _identity(record)
        if identity not in self._found:
            self._found[identity] = record, path
            return True
        mine, where = self._found[identity]
        if (what := _contradiction(mine, record)) is not None:
            raise UsageError(
                f"{_label(record)} has {what[0]} = {what[1]} in {where}, and {what[2]} in {path}: "
                "one of the two is wrong; leave one out"
            )
        return False


def _sources(campaign: Campaign, others: Sequence[Path]) -> list[Source]:
    """All that is to be joined, each once; raises UsageError for a folder that doesn't belong to the campaign."""
    own = {cell.number: cell.number for cell in campaign.cells}
    found = [Source(path, own) for path in campaign.folder.shards]
    for path in dict.fromkeys(other.resolve() for other in others):
        if path == campaign.folder.path.resolve():
            continue
        other = open_campaign(path)
        _check_same(campaign, other)
        numbers = {cell.key: cell.number for cell in campaign.cells}
        mapped = {cell.number: numbers[cell.key] for cell in other.cells if cell.key in numbers}
        databases = [each for each in (other.folder.results(),) if each.exists()] + other.folder.shards
        if not databases:
            raise UsageError(f"{path} has no results yet")
        found += [Source(database, mapped) for database in databases]
    if not found:
        raise UsageError(f"{campaign.folder.path} has no results of shards, and no other folder was given")
    return found


def _check_same(campaign: Campaign, other: Campaign) -> None:
    if (found := difference(other.spec, campaign.spec)) is not None:
        key, theirs, mine = found
        raise UsageError(
            f"{other.folder.path} has results with {key} = {theirs}, {campaign.folder.path} has {mine}: "
            "these are different campaigns"
        )


def _renumbered(record: RunRecord, source: Source) -> RunRecord:
    """The record with the campaign's numbers of cells."""
    if record.cell < 0:
        return record
    if record.cell not in source.numbers:
        raise UsageError(
            f"{source.path} has results of its cell {record.cell}, which the campaign doesn't have: "
            "add its axis values to the campaign's spec first"
        )
    reused = None if record.reused is None else (source.numbers[record.reused[0]], record.reused[1])
    return replace(record, cell=source.numbers[record.cell], reused=reused)


def _key(record: RunRecord) -> Identity:
    """What tells a run from all others of its database."""
    return (record.kind, record.cell, record.trial, record.parallel, record.training_seed, record.checkpoint,
            record.settings, record.fingerprint)  # fmt: skip


def _identity(record: RunRecord) -> Identity:
    """What there may be one of in a campaign: a trial, whoever made it; a golden run for each kind of machine."""
    if record.kind in ("trial", "audit"):
        return record.kind, record.cell, record.trial
    if record.kind == "null":
        return record.kind, record.parallel, record.checkpoint, record.settings, record.trial
    return _key(record)


def _contradiction(mine: RunRecord, other: RunRecord) -> tuple[str, str, str] | None:
    """The first thing that two results don't agree in, though they should, and both values."""
    if mine.fingerprint != other.fingerprint:
        return None
    if mine.checkpoint is not None and not mine.plan:  # of a user's command, whose runs may not repeat
        return None
    for name, one, two in (
        ("failure", *(run.ended if run.failed else "" for run in (mine, other))),
        *((name, getattr(mine, name), getattr(other, name)) for name in COMPARED),
    ):
        if json.dumps(one) != json.dumps(two):  # as text, where NaN equals NaN
            return name, json.dumps(one), json.dumps(two)
    return None


def _label(record: RunRecord) -> str:
    if record.cell >= 0:
        return f"{record.kind} {record.trial} of cell {record.cell}"
    what = f"null trial {record.trial}" if record.kind == "null" else f"the {record.kind} run"
    return f"{what} of {record.parallel}, training seed {record.training_seed},"


def _records(
    sources: Sequence[Source], stores: Sequence[Store], chosen: Sequence[set[Identity]]
) -> Iterator[RunRecord]:
    """The chosen runs of each database, whole."""
    for source, store, keys in zip(sources, stores, chosen, strict=True):
        if keys:
            for record in store.runs(*KINDS, detail=True):
                if _key(record) in keys:
                    yield _renumbered(record, source)


def _seconds(target: Store, sources: Sequence[Source], stores: Iterable[Store]) -> dict[str, Any]:
    """The facts of the joined database: the seconds that all have run, those of each source counted once."""
    facts = target.facts()
    counted = dict(facts.get("merged", {}))
    seconds = float(facts.get("seconds", 0.0))
    for source, store in zip(sources, stores, strict=True):
        name, now = str(source.path.resolve()), float(store.facts().get("seconds", 0.0))
        seconds += now - counted.get(name, 0.0)
        counted[name] = now
    return {"seconds": seconds, "merged": counted}
