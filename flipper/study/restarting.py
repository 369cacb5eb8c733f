"""Restarting: is a run that goes on from a checkpoint the uninterrupted one to the bit, and if not, what was missing?

Found by running: a checkpoint of each kind is kept at one step of a run; fresh processes train without interruption,
and once more from each checkpoint. What a checkpoint lacks starts anew, as at the beginning of training. Where the two
part, all that was missing is given back and taken away again, a part at a time, to see which parts are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import torch.distributed as dist
from torch import Tensor

from flipper.errors import TrainingError
from flipper.study import formats
from flipper.study.formats.format import Asynchronous, told
from flipper.study.spec import Combination, StudySpec
from flipper.study.subjects import InTraining, emptied, spoken_for
from flipper.training import canonical, saving
from flipper.training.canonical import State
from flipper.training.parallel.shards import whole
from flipper.training.ranks import Emit, Place
from flipper.training.ties import parameters_of, ties_of
from flipper.training.watch import joined_digest

KEPT_AT: Final = 10
"""The step whose checkpoint is gone on from; the next one where an epoch ends there."""

AFTER: Final = 3
"""Steps that are trained from it."""

COMPARED: Final = ("model.", "optimizer.", "scheduler.")

UNEXPLAINED: Final = "something else"
ALTERED: Final = "the values of {}"


def kept_path(folder: Path, combination: Combination) -> Path:
    """Where the checkpoint of a kind is kept."""
    kind = (combination.format, combination.content, combination.ranks, combination.mode)
    return folder / "-".join(("kept", *map(str, kind)))


def kinds_of(combinations: Iterable[Combination]) -> list[Combination]:
    """Those that differ in more than fsync, which changes no byte."""
    found: dict[tuple[object, ...], Combination] = {}
    for each in combinations:
        found.setdefault((each.format, each.content, each.ranks, each.mode), each)
    return list(found.values())


def keep(spec: StudySpec, ranks: int, folder: Path, place: Place, combinations: Iterable[Combination]) -> None:
    """Save a checkpoint of each kind at one step; those in the background while training goes on. A collective."""
    run: InTraining | None = None
    for kind in sorted(kinds_of(combinations), key=lambda kind: kind.mode, reverse=True):
        if run is None or kind.mode == "async":
            run = _at_the_step(spec, ranks, place)
        with told(kind.format, folder):
            _save(run, kind, kept_path(folder, kind))


def _save(run: InTraining, kind: Combination, path: Path) -> None:
    """In its mode; in the background, the run goes on meanwhile."""
    format, shards = formats.get(kind.format), spoken_for(run, kind.content)
    if kind.mode == "sync":
        format.save(shards, run.grid, path, False)
        return
    pending = cast(Asynchronous, format).save_async(shards, run.grid, path, False)
    for _ in range(AFTER):
        run.step()
    pending.result()


def _at_the_step(spec: StudySpec, ranks: int, place: Place) -> InTraining:
    subject = InTraining.begun(spec, ranks, place)
    for _ in range(_kept_at(subject)):
        subject.step()
    return subject


def _kept_at(subject: InTraining) -> int:
    return KEPT_AT + (KEPT_AT % subject.batches == 0 and subject.batches > 1)


def restart_rank(spec: StudySpec, ranks: int, folder: Path, place: Place, emit: Emit) -> None:
    """Train without interruption, and from every checkpoint that is kept; rank 0 emits a "restarted" for each."""
    restarts = _Restarts.prepared(spec, ranks, folder, place)
    for kind in kinds_of(spec.combinations(ranks)):
        loaded = restarts.loaded(kind)
        missing = restarts.missing(loaded, kind.content)
        if place.rank == 0:
            emit({"event": "restarted", "combination": kind, "missing": missing})


@dataclass
class _Restarts:
    """golden: the digest of all ranks after the uninterrupted run. initial, full: its canonical state at the beginning,
    and where the checkpoints were kept. again: trains from a state and gives its digest."""

    golden: str
    initial: State
    full: State
    buffers: frozenset[str]
    ties: Mapping[str, str]
    subject: InTraining
    folder: Path
    again: Callable[[State], str]
    _lacked: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def prepared(cls, spec: StudySpec, ranks: int, folder: Path, place: Place) -> _Restarts:
        subject = InTraining.begun(spec, ranks, place)
        initial = _shared(subject, folder / f"initial-{ranks}.safetensors")
        for _ in range(_kept_at(subject)):
            subject.step()
        full = _shared(subject, folder / f"full-{ranks}.safetensors")
        model = subject.run.whole
        parameters = {f"model.{name}" for name in parameters_of(model)}
        ties = {f"model.{alias}": f"model.{name}" for alias, name in ties_of(model).items()}
        buffers = frozenset(name for name in full if name.startswith("model.")) - parameters - ties.keys()

        def again(state: State) -> str:
            return _trained(InTraining.begun(spec, ranks, place, state))

        return cls(_trained(subject), initial, full, buffers, ties, subject, folder, again)

    def loaded(self, kind: Combination) -> State:
        """What the kept checkpoint of a kind holds, whole on every rank."""
        names = {name for each in self.subject.grid.everyone(set(self.subject.held(kind.content))) for name in each}
        into = emptied({name: whole(self.full[name]) for name in sorted(names)})
        format = formats.get(kind.format)
        format.prepare(self.subject.grid)
        format.load(into, self.subject.grid, kept_path(self.folder, kind))
        return {name: shard.tensor for name, shard in into.items()}

    def missing(self, loaded: State, content: str) -> list[str]:
        """What a run from these tensors lacked to be the uninterrupted one: nothing where it is."""
        if self._exact(loaded):
            return []
        if altered := [name for name in loaded if not canonical.same_bits(loaded[name], self.full[name])]:
            return [ALTERED.format(altered[0])]
        if content not in self._lacked:
            self._lacked[content] = self._needed(loaded)
        return self._lacked[content]

    def _needed(self, loaded: State) -> list[str]:
        """The parts that these tensors, which are right but too few, have to be given for an exact run."""
        lacking = {label: names for label, names in self._kinds().items() if names and not names & loaded.keys()}
        if not self._exact(loaded | self._of(lacking.values())):
            return [UNEXPLAINED]
        for label in list(lacking):
            rest = {other: names for other, names in lacking.items() if other != label}
            if self._exact(loaded | self._of(rest.values())):
                lacking = rest
        return list(lacking)

    def _exact(self, given: State) -> bool:
        state = self.initial | given
        state |= {alias: state[name] for alias, name in self.ties.items()}
        return self.again(state) == self.golden

    def _of(self, kinds: Iterable[frozenset[str]]) -> State:
        return {name: self.full[name] for names in kinds for name in names}

    def _kinds(self) -> dict[str, frozenset[str]]:
        """What may be missing: a label, and the names of the tensors."""
        starts = {"optimizer": "optimizer.", "scheduler": "scheduler.", "data position": "progress.", "RNG": "rng."}
        named = {
            label: frozenset(name for name in self.full if name.startswith(start)) for label, start in starts.items()
        }
        return {"buffers": self.buffers, **named}


def _trained(subject: InTraining) -> str:
    """The digest, of all ranks, of what AFTER more steps make of the state."""
    for _ in range(AFTER):
        subject.step()
    return joined_digest(subject.grid.everyone(canonical.digest(subject.run.layout.resident(), COMPARED)))


def _shared(subject: InTraining, path: Path) -> dict[str, Tensor]:
    """The run's canonical state on every rank, through a file; but at the beginning what it can't have begun with."""
    state = subject.run.canonical_state()
    if subject.grid.rank == 0:
        if not subject.run.progress.step:
            state = {name: tensor for name, tensor in state.items() if name.startswith(("model.", "progress."))}
        saving.save(state, path, "safetensors")
    if subject.grid.world > 1:
        dist.barrier()
    if not path.exists():
        raise TrainingError(f"{path} was not written")
    return saving.load(path)
