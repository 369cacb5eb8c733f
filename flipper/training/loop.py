"""What every rank runs: load, train, evaluate, save; rank 0 tells the launching process what happens."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flipper.errors import FlipperError, OutputError, TrainingError, UsageError
from flipper.training import canonical, parallel, recipes, saving, seeds
from flipper.training.canonical import State
from flipper.training.detectors import Detectors, replayed_step
from flipper.training.faults_file import LiveFaults
from flipper.training.fingerprint import fingerprint
from flipper.training.interval import Interval
from flipper.training.parallel.shards import Shard, whole
from flipper.training.progress import Progress
from flipper.training.ranks import Emit, Place, one_line
from flipper.training.reach import Reach
from flipper.training.recipes.parts import data_of, model_of, scores_of
from flipper.training.recipes.recipe import Data, Recipe
from flipper.training.replicas import compare_replicas
from flipper.training.spec import ALWAYS, TrainSpec, Watch, checkpoint_path
from flipper.training.strikes import LocalGradientStrike, Struck, strike_gradients, strike_state
from flipper.training.ties import parameters_of
from flipper.training.watch import all_nonfinite, joined_digest, measure, resident_bits

EVALUATED: Final = 2048
"""Test samples that go through the model together: activations of a large set would take gigabytes."""


def train_rank(spec: TrainSpec, place: Place, emit: Emit) -> None:
    """One rank's part of a training run. Only rank 0 emits, and only rank 0 writes files."""
    began = time.monotonic()
    if place.joined:  # each rank was asked for by itself, and drew a seed of its own where none was given
        shared = [spec.seed]
        dist.broadcast_object_list(shared, src=0)
        spec = replace(spec, seed=shared[0])
    to_the_end(begin(spec, place, emit), began)


def to_the_end(run: Run, began: float, before_step: Callable[[int], None] = lambda number: None) -> None:
    """Train from the run's first step to its last. before_step: called with each step's number."""
    run.announce()
    if run.progress.step == run.total:
        run.look_and_save()
    while run.progress.step < run.total and run.stopped is None:
        before_step(run.progress.step + 1)
        run.train_step()
        run.notice()
        run.look_and_save()
    run.end(began)


def begin(
    spec: TrainSpec,
    place: Place,
    emit: Emit,
    set_up: parallel.SetUp = parallel.set_up,
    batch_size: int | None = None,
    state: State | None = None,
) -> Run:
    """The run at its first step: its layout loaded from the checkpoint, or from the seed's initial state.

    set_up: makes the layout. batch_size: instead of the recipe's. state: instead of the checkpoint's.
    """
    seeds.seed_recipe()
    recipe = recipes.get(spec.recipe)
    data = data_of(recipe, spec.data_dir)
    if batch_size is not None:
        if not 0 < batch_size <= len(data.train_targets):
            samples = len(data.train_targets)
            raise UsageError(f"--batch-size {batch_size}: {recipe.name} has {samples} samples to train on")
        recipe = replace(recipe, batch_size=batch_size)
    batches = len(data.train_targets) // recipe.batch_size
    total = spec.steps if spec.steps is not None else (recipe.epochs if spec.epochs is None else spec.epochs) * batches
    torch.manual_seed(seeds.derive(spec.seed or 0, "initial"))
    model = model_of(recipe)
    if state is None and spec.resume is not None:
        state = saving.load(spec.resume)
    if state is None:
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        progress = Progress(0, 0, 0, spec.seed or 0)
    else:
        canonical.check(state, model, spec.recipe)
        progress = Progress.from_state(state, batches)
    if progress.step > total:
        raise UsageError(
            f"{spec.resume} is at step {progress.step} already, after the {total} steps that were asked for "
            f"(--steps and --epochs count from the beginning of training; an epoch has {batches})"
        )
    sample = data.train_features[: recipe.batch_size]
    layout = set_up(spec.parallel, recipe, place, sample, spec.summing)
    _refuse_nondeterminism(recipe)
    layout.load(state)
    if spec.seed not in (None, progress.seed):  # a resumed run with other data order and dropout
        progress = replace(progress, seed=spec.seed or 0)
        state = {}
    if not seeds.reinstate(state, place.rank, str(spec.parallel), layout.grid.device):
        seeds.seed_rank(progress.seed, layout.grid.stream, progress.step)
    if spec.at is not None and not progress.step <= spec.at < total:
        raise UsageError(f"--at {spec.at}: this run can be struck after the steps {progress.step} to {total - 1}")
    detectors = Detectors((*ALWAYS, *spec.detect), layout)
    run = Run(spec, emit, recipe, data, model, batches, total, layout, detectors, progress, spec.inject)
    run.start_at(progress)
    return run


def _refuse_nondeterminism(recipe: Recipe) -> None:
    """Raise UsageError when a recipe has changed what makes runs repeat to the bit; flipper set it before."""
    wrong = {
        f"torch.set_num_threads({torch.get_num_threads()})": torch.get_num_threads() != 1,
        "torch.use_deterministic_algorithms(False)": not torch.are_deterministic_algorithms_enabled(),
        "warn_only=True": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.backends.cudnn.benchmark = True": torch.backends.cudnn.benchmark,
    }
    if found := [setting for setting, holds in wrong.items() if holds]:
        raise UsageError(f"{recipe.name} sets {found[0]}: runs would not repeat to the bit; leave it out of the recipe")


@dataclass
class Run:
    """A training run under way on one rank. Its methods are collectives: all ranks call them together."""

    spec: TrainSpec
    send: Emit
    recipe: Recipe
    data: Data
    whole: nn.Module
    batches: int
    total: int
    layout: parallel.Layout
    detectors: Detectors
    progress: Progress
    pending: LiveFaults | None
    stopped: str | None = None
    last: parallel.StepResult | None = None
    replayed: int | None = None
    told: dict[str, Any] | None = None
    interval: Interval | None = None
    overwrites: bool = False
    """Whether a checkpoint that is there takes the new one's place: a run whose ranks die does steps again."""

    def start_at(self, progress: Progress) -> None:
        """Have the next step be the run's first."""
        self.progress = progress
        self.interval = None if self.spec.mtbf is None else Interval(self.spec.mtbf, progress.step)

    def emit(self, event: str, **values: object) -> None:
        """Tell the launching process, if this is rank 0."""
        if self.layout.grid.rank == 0:
            self.send({"event": event, **values})

    def announce(self) -> None:
        """Say that the run starts, unless it can't save what it is to save."""
        self.refuse_unsavable()
        machine = fingerprint(self.layout.grid.device.type)
        self.emit("start", step=self.progress.step, steps=self.total, seed=self.progress.seed, fingerprint=machine)

    def train_step(self) -> None:
        """One batch: its samples are a function of seed, epoch and position alone."""
        began = time.monotonic()
        if (faults := self._due("state")) is not None:
            self._say_struck(strike_state(self.layout, faults, self.reach))
        position, size = self.progress.batch * self.recipe.batch_size, self.recipe.batch_size
        order = seeds.batch_order(self.progress.seed, self.progress.epoch, len(self.data.train_targets))
        attempt = functools.partial(self._attempt, order[position : position + size])
        replayed = None
        try:
            if self.detectors.replays:
                result, replayed = replayed_step(self.layout, attempt)
            else:
                result = attempt()
        except FlipperError:
            raise
        except Exception as error:  # whatever a struck state makes torch raise
            raise TrainingError(one_line(error, f"in step {self.progress.step + 1}")) from error
        epoch = self.progress.epoch
        self.progress = self.progress.advance(self.batches)
        if self.interval is not None:
            self.interval.note(time.monotonic() - began)
        self.told = {
            "step": self.progress.step, "epoch": epoch, "loss": result.loss, "grad_norm": result.grad_norm,
            "lr": result.lr, "samples_per_s": size / max(time.monotonic() - began, 1e-9),
        }  # fmt: skip
        self.tell_step()
        self.last, self.replayed = result, replayed

    def tell_step(self) -> None:
        """Tell of the last step; again, when this rank has become the first, since the one before may have died first.
        """
        if self.told is not None:
            self.emit("step", **self.told)

    @property
    def notices(self) -> bool:
        """Whether `notice` talks to other ranks after this step."""
        watch = self.spec.watch
        compares = watch is not None and (watch.stop or watch.asks(self.progress.step))
        return self._probes or "nonfinite-state" in self.spec.detect or compares

    @property
    def looks(self) -> bool:
        """Whether there is anything to evaluate or to save after this step."""
        return self._evaluates_at(self.progress.step) or self._saves_at(self.progress.step)

    def notice(self) -> None:
        """After a step: what the detectors, the replica probe and the watch notice."""
        assert self.last is not None
        self.detect(self.last, self.replayed)
        if self.spec.watch is not None:
            self._compare(self.spec.watch, self.last.loss)

    def _compare(self, watch: Watch, loss: float) -> None:
        """Tell the digest where the watch asks for it, and note when the rest of the run is known already."""
        step = self.progress.step
        if watch.asks(step):
            digest = self.resume_digest()
            self.emit("digest", step=step, resume_digest=digest)
            if watch.stop and watch.golden.get(step) == digest and step < self.total:
                self.stopped = "identical"
        if watch.stop and not math.isfinite(loss) and step < self.total and all_nonfinite(self.layout):
            self.stopped = "non-finite"

    def _attempt(self, batch: Tensor) -> parallel.StepResult:
        """The step itself, with the faults in its gradients that are due; a second attempt has none."""
        seeds.seed_libraries(self.progress.seed, self.layout.grid.stream, self.progress.step)
        step = functools.partial(self.layout.step, self.data.train_features, self.data.train_targets, batch)
        if (faults := self._due("gradient")) is not None:
            struck: list[Struck] = []
            strike = functools.partial(strike_gradients, self.layout, faults=faults, reach=self.reach)
            result = step(lambda gradients: struck.append(strike(gradients)))
            self._say_struck(struck[0])
            return result
        if (faults := self._due("local-gradient")) is not None:
            armed = LocalGradientStrike(self.layout, faults, self.reach)
            try:
                result = step()
            finally:
                armed.disarm()
            self._say_struck(armed.struck)
            return result
        return step()

    def _due(self, target: str) -> LiveFaults | None:
        """The faults to make now, once."""
        faults = self.pending
        if faults is None or faults.target != target or self.spec.at != self.progress.step:
            return None
        self.pending = None
        return faults

    def _say_struck(self, struck: Struck) -> None:
        self.emit("struck", step=self.spec.at, reach=self.spec.reach, **dataclasses.asdict(struck))

    @property
    def reach(self) -> Reach:
        """Which copies are struck."""
        return Reach.parse(self.spec.reach, self.spec.parallel)

    def detect(self, result: parallel.StepResult, replayed: int | None) -> None:
        """What the detectors and the replica probe notice after a step."""
        step = self.progress.step
        comparison = compare_replicas(self.layout) if self._probes else None
        if comparison is not None and self.spec.probe_every:
            gap = comparison.max_abs_difference
            self.emit("replicas", step=step, equal=comparison.equal, max_abs_difference=gap)
        for finding in self.detectors.after(result, replayed, comparison):
            self.emit("detect", detector=finding.detector, step=step, rank=finding.rank, value=finding.value)

    @property
    def _probes(self) -> bool:
        every = self.spec.probe_every or int("replicas" in self.spec.detect)
        return every > 0 and self.progress.step % every == 0

    def look_and_save(self) -> None:
        """After a step: evaluate at the end of an epoch and of the run, save where --save says."""
        step = self.progress.step
        if self._evaluates_at(step):
            self.evaluate()
        if self._saves_at(step):
            began = time.monotonic()
            self.save()
            if self.interval is not None and step == self.interval.first:
                self._choose(self.interval, time.monotonic() - began)

    def _choose(self, interval: Interval, save_seconds: float) -> None:
        """Have checkpoints be as far apart as the first rank finds right."""
        chosen = self.layout.grid.everyone(interval.chosen(save_seconds))[0]
        interval.every = int(chosen["save_every"])
        self.emit("interval", step=self.progress.step, **chosen)

    def _evaluates_at(self, step: int) -> bool:
        every = self.spec.evaluate_every
        return step == self.total or self.progress.batch == 0 or (every > 0 and step % every == 0)

    def evaluate(self) -> None:
        """Loss and accuracy on the test data, of the canonical state, whatever the layout.

        Where replicas may differ, of each one's own state; the events of all but the first name their `replica`.
        The model that holds it was made before training: making one now would draw from the generators.
        """
        apart = self.layout.grid.parallel.replicated and (self.spec.reach != "all" or self.spec.probe_every > 0)
        scores: dict[int, tuple[float, float]] = {}
        for replica in range(self.layout.grid.parallel.data_size if apart else 1):
            if state := self.layout.gather(replica):
                scores[replica] = self._score(state)
        if apart:
            scores = {replica: score for each in self.layout.grid.everyone(scores) for replica, score in each.items()}
        for replica, (loss, accuracy) in sorted(scores.items()):
            which = {"replica": replica} if replica else {}
            self.emit("eval", step=self.progress.step, epoch=self.progress.epoch, loss=loss, accuracy=accuracy, **which)

    def _score(self, state: State) -> tuple[float, float]:
        prefix = "model."
        self.whole.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        self.whole.eval()
        loss, accuracy, samples = 0.0, 0.0, len(self.data.test_targets)
        parts = zip(
            torch.split(self.data.test_features, EVALUATED), torch.split(self.data.test_targets, EVALUATED), strict=True
        )
        with torch.no_grad():
            for features, targets in parts:
                output, share = self.whole(features), len(targets) / samples
                scores = scores_of(self.recipe, output, targets)
                loss, accuracy = loss + scores[0] * share, accuracy + scores[1] * share
        return loss, accuracy

    def save(self) -> None:
        """Write this step's checkpoint: on rank 0, but shards by torch.distributed.checkpoint where they lie."""
        assert self.spec.save
        path = self._path(self.progress.step)
        if self.spec.checkpoint_format == "dcp" and self.layout.grid.parallel.parted:
            saving.save_shards(self._to_save(), self.layout.ties, path, self.layout.grid, self.overwrites)
        else:
            state = self.canonical_state()
            if self.layout.grid.rank == 0:
                saving.save(state, path, self.spec.checkpoint_format, self.overwrites)
        self.emit("saved", step=self.progress.step, path=str(path))

    def _to_save(self) -> dict[str, Shard]:
        """The shards of the canonical state that this rank speaks for."""
        schedule, common = self.layout.schedule, self.progress.to_state()
        common |= {} if schedule is None else schedule.to_state()
        mine = self._generators()
        if self.layout.grid.rank == 0:
            mine |= common
        else:
            del mine["rng.layout"]
        live = self.layout.spoken_for(self.layout.live())
        return live | {name: whole(tensor) for name, tensor in mine.items()}

    def canonical_state(self) -> State:
        """Model, optimizer, progress and every rank's generators, on rank 0; empty elsewhere."""
        state = self.layout.gather()
        generators = self.layout.grid.everyone(self._generators())
        if self.layout.grid.rank:
            return {}
        for generator in generators:
            state.update(generator)
        return {**state, **self.progress.to_state()}

    def _generators(self) -> State:
        return seeds.capture(self.layout.grid.rank, str(self.layout.grid.parallel), self.layout.grid.device)

    def end(self, began: float) -> None:
        """The digests, and where the run has a watch, how it differs from the golden one."""
        digest = self.resume_digest()
        state = self.layout.gather()
        measured: dict[str, object] = {}
        if self.spec.watch is not None:
            resident = self.layout.grid.everyone(resident_bits(self.layout))
            measured = {"stopped": self.stopped, "resident": resident}
            if self.layout.grid.rank == 0:
                parameters = frozenset(parameters_of(self.whole))
                measured |= measure(state, parameters, self.spec.watch.reference)
        self.emit(
            "end",
            step=self.progress.step,
            state_digest=canonical.digest(state),
            resume_digest=digest,
            seconds=time.monotonic() - began,
            **measured,
        )

    def resume_digest(self) -> str:
        """The digest of all that the next step depends on, rank by rank; a collective, the same on each."""
        resident = {
            **self.layout.resident(),
            **self._generators(),
            **self.progress.to_state(),
        }
        mine = canonical.digest(resident, ("model.", "optimizer.", "scheduler.", "rng.", "progress."))
        return joined_digest(self.layout.grid.everyone(mine))

    def refuse_unsavable(self) -> None:
        """Raise OutputError before the first step if a checkpoint can't be written, or is there already."""
        problem = None
        if self.spec.save is not None and self.layout.grid.rank == 0:
            try:
                saving.check_folder(self.spec.save)
                self._refuse_existing(self.spec.save)
            except OutputError as error:
                problem = error
        if (first := self.layout.grid.everyone(problem)[0]) is not None:
            raise first

    def _refuse_existing(self, folder: Path) -> None:
        if self.overwrites:
            return
        for path in folder.glob("step-*"):
            number = path.stem.removeprefix("step-")
            step = int(number) if number.isascii() and number.isdigit() else 0
            ahead = self.progress.step < step or step == self.total
            if ahead and (self.interval is not None or self._saves_at(step)) and path == self._path(step):
                raise OutputError(saving.exists(path))

    def _saves_at(self, step: int) -> bool:
        every, epoch = self.spec.save_every, self.spec.save_epoch
        due = step == self.total or (every > 0 and step % every == 0) or (epoch and step == epoch * self.batches)
        due = due or (self.interval is not None and self.interval.due(step))
        return self.spec.save is not None and bool(due)

    def _path(self, step: int) -> Path:
        assert self.spec.save
        return checkpoint_path(self.spec.save, step, self.spec.checkpoint_format)
