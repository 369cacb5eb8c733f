"""Detectors and the replica probe: each goes off at the step of its fault, says where, and is silent in a clean run."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import rank_bodies
from series import Run, spec, train_all

from flipper.errors import UsageError
from flipper.training.detectors import Spikes
from flipper.training.faults_file import faults_of
from flipper.training.launch import run_ranks
from flipper.training.spec import DETECTORS, Event, Parallel

# Every other step forgets what the parameters were: replicas whose gradients are summed become equal again.
FORGETFUL = """
import torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

class Forgetful(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            steps = self.state[parameter].get("step", torch.zeros(()))
            kept = parameter if int(steps) % 2 == 0 else torch.zeros_like(parameter)
            parameter.copy_(kept - 0.1 * parameter.grad)
            self.state[parameter]["step"] = steps + 1

def data(folder):
    features = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    targets = (features.sum(dim=1) > 2).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

OWN = Recipe("own", model, data, nn.functional.cross_entropy, accuracy, Forgetful, 8)
"""


def median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def expected_scores(series: list[float]) -> list[float | None]:
    """By the definition: of the last fifty values that were finite and no spikes, once there are ten."""
    kept: list[float] = []
    scores: list[float | None] = []
    for value in series:
        score = None
        window = kept[-50:]
        if math.isfinite(value) and len(window) >= 10:
            middle = median(window)
            mad = median([abs(each - middle) for each in window])
            score = (value - middle) / max(1.4826 * mad, 1e-9 * abs(middle), 1e-300)
        found = score if score is not None and score > 8 and value > 2 * max(window) else None
        if math.isfinite(value) and found is None:
            kept.append(value)
        scores.append(found)
    return scores


@pytest.mark.parametrize("seed", range(20))
def test_spikes_are_robust_z_scores_above_eight(seed: int) -> None:
    """Falling losses with noise, spikes up and down, values that aren't finite, and stretches without any spread."""
    draw = random.Random(seed)
    series = []
    for step in range(200):
        value = 3 / (1 + step / 40) + draw.gauss(0, 0.01)
        kind = draw.random()
        if kind < 0.05:
            value += draw.choice((1, 10, 1e30, -1, -1e30))
        elif kind < 0.08:
            value = draw.choice((math.nan, math.inf, -math.inf))
        elif seed % 4 == 0:
            value = 1.0
        series.append(value)
    spikes = Spikes()
    assert [spikes.score(value) for value in series] == expected_scores(series)


def test_what_grows_steadily_makes_no_spike() -> None:
    """The first gradient norms of a clean run of digits-mlp, which the score alone takes for spikes."""
    norms = [0.24, 0.19, 0.22, 0.27, 0.19, 0.27, 0.26, 0.21, 0.20, 0.25, 0.25, 0.30, 0.26, 0.26, 0.30, 0.27]
    norms += [0.35, 0.38, 0.40, 0.38, 0.41, 0.41, 0.55, 0.57, 0.61, 0.68, 0.74, 1.01, 1.08, 0.88, 1.44, 0.84]
    spikes = Spikes()
    assert [spikes.score(norm) for norm in norms] == [None] * len(norms)
    assert (spikes.score(3.5) or 0) > 8


def test_no_spike_is_seen_before_ten_steps_and_a_lasting_change_is_one_each_time() -> None:
    spikes = Spikes()
    assert [spikes.score(value) for value in (1.0, 1e9, 1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.02)] == [None] * 10
    assert all((spikes.score(1e12) or 0) > 8 for _ in range(3))
    assert spikes.score(1.0) is None


def mlp(layout: str = "single", steps: int = 4, at: int | None = None, **options: Any) -> Any:
    """A spec of digits-mlp; the faults of `table` strike after step `at`."""
    table = options.pop("table", None)
    inject = None if table is None else faults_of({"seed": 1, **table})
    return spec("digits-mlp", layout, steps=steps, at=at, inject=inject, **options)


def detected(run: Run) -> list[tuple[str, int, int]]:
    """(detector, step, rank), from the events, which the result's own list must equal."""
    events = run.of("detect")
    assert run.detected == [{key: event[key] for key in ("detector", "step", "rank")} for event in events]
    return [(event["detector"], event["step"], event["rank"]) for event in events]


INFINITE: dict[str, Any] = {"bits": "exponent", "effect": "set1", "burst": 8, "count": 1}


def test_a_clean_run_sets_off_nothing_and_is_the_run_without_detectors() -> None:
    """Over an epoch's end, replicas compared and every step taken twice."""
    plain, watched = train_all([mlp("ddp:2", 30), mlp("ddp:2", 30, detect=DETECTORS, probe_every=10)])
    assert detected(watched) == []
    assert watched.digests == plain.digests
    assert watched.losses == plain.losses
    assert [(event["step"], event["equal"]) for event in watched.of("replicas")] == [(10, True), (20, True), (30, True)]
    assert (watched.replicas_differ_step, watched.replicas_heal_step) == (None, None)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("mnist5k-cnn", "single"),
        ("digits-cnn", "hooks:3"),
        ("digits-cnn", "fsdp:2"),
        ("digits-cnn", "tensor:2"),
        ("digits-cnn", "pipeline-1f1b:2"),
        ("digits-cnn", "ddp:2+pipeline:2"),
    ],
)
def test_steps_taken_twice_repeat_to_the_bit_under_every_kind_of_layout(recipe: str, layout: str) -> None:
    """Dropout, BatchNorm, Adam's first step and the schedule are put back in between."""
    plain, replayed = train_all([spec(recipe, layout, steps=2), spec(recipe, layout, steps=2, detect=("replay",))])
    assert detected(replayed) == []
    assert replayed.digests == plain.digests


def test_a_loss_that_is_not_finite_is_told_once_at_its_step() -> None:
    """It lasts; the state is not finite from the same step on."""
    (run,) = train_all([mlp(at=1, table={"layer": ["model.fc3.weight"], **INFINITE}, detect=("nonfinite-state",))])
    assert detected(run) == [("nonfinite-loss", 2, 0), ("nonfinite-state", 2, 0)]
    assert [math.isfinite(loss) for loss in run.losses] == [True, False, False, False]


@pytest.mark.parametrize(("layout", "owner"), [("pipeline:2", 1), ("ddp:2", 0), ("single", 0)])
def test_a_state_that_is_not_finite_is_told_with_its_rank_a_step_before_the_loss(layout: str, owner: int) -> None:
    """Infinite momentum makes the parameter infinite; the second stage holds both."""
    table = {"layer": ["optimizer.fc3.bias.momentum_buffer"], "bits": "exponent", "effect": "set1", "burst": 8}
    (run,) = train_all([mlp(layout, at=1, table=table, detect=("nonfinite-state",))])
    assert detected(run)[0] == ("nonfinite-state", 2, owner)
    assert detected(run)[1] == ("nonfinite-loss", 3, 0)
    assert len(detected(run)) == 2


def test_a_spike_of_the_loss_is_told_at_its_step() -> None:
    table = {"layer": ["model.fc3.weight"], "effect": "scale:100", "fraction": 1}
    (run,) = train_all([mlp(steps=13, at=11, table=table)])
    (event,) = (event for event in run.of("detect") if event["detector"] == "loss-spike")
    assert (event["step"], event["rank"]) == (12, 0)
    assert event["value"] == pytest.approx(expected_scores(run.losses)[11])


def test_a_spike_of_the_gradients_norm_is_told_at_its_step_before_any_of_the_loss() -> None:
    table = {"layer": ["gradient.fc3.weight"], "effect": "scale:1000", "fraction": 1, "target": "gradient"}
    (run,) = train_all([mlp("ddp:2", steps=12, at=11, table=table)])
    (event,) = run.of("detect")
    assert (event["detector"], event["step"]) == ("grad-norm-spike", 12)
    assert event["value"] == pytest.approx(expected_scores([step["grad_norm"] for step in run.of("step")])[11])


@pytest.mark.parametrize(("layout", "rank"), [("ddp:2", 1), ("hooks:3", 2), ("ddp:2+pipeline:2", 3)])
def test_replicas_that_differ_are_told_with_the_first_rank_that_does(layout: str, rank: int) -> None:
    table = {"layer": ["model.fc3.bias"], "bits": "mantissa-msb", "count": 1}
    (run,) = train_all([mlp(layout, at=2, table=table, reach=f"rank:{rank}", detect=("replicas",))])
    assert detected(run) == [("replicas", 3, rank)]
    assert run.of("replicas") == []  # the probe has events of its own, and was not asked for


@pytest.mark.parametrize(("reach", "rank"), [("all", 0), ("rank:1", 1)])
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_went_wrong_in_passing_does_not_repeat(at: int, reach: str, rank: int) -> None:
    """The first attempt's outcome is kept: the run is the one that nobody replayed."""
    table = {"layer": ["gradient.fc1.weight"], "bits": "sign", "count": 2, "target": "gradient"}
    plain, replayed = train_all(
        [mlp("hooks:2", at=at, table=table, reach=reach, detect=detect) for detect in ((), ("replay",))]
    )
    assert detected(replayed) == [("replay", at + 1, rank)]
    assert replayed.digests == plain.digests
    assert len(replayed.of("struck")) == 1


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("ddp:2", {}),
        ("ddp:2", {1: 0.125}),
        ("hooks:3", {1: 0.125, 2: -3.5}),
        ("ddp:3", {0: 1e30}),
        ("ddp:2", {1: math.inf}),
        ("ddp:3", {0: math.inf, 1: math.inf}),
        ("ddp:2", {0: math.inf, 1: -math.inf}),
        ("ddp:2", {0: math.nan}),
        ("ddp:2", {0: math.nan, 1: math.nan}),
        ("ddp:2", {0: 0.0, 1: -0.0}),
        ("ddp:2+pipeline:2", {3: 7.0}),
        ("ddp:2+pipeline:2", {1: 7.0}),
    ],
)
def test_the_probe_says_by_how_much_parameters_differ(layout: str, changes: dict[int, float]) -> None:
    """Against numpy on what every rank holds; a NaN on one side and not the other is infinitely far."""
    events: list[Event] = []
    parallel = Parallel.parse(layout)
    run_ranks(functools.partial(rank_bodies.compare_changed_replicas, parallel, changes), parallel.ranks, events.append)
    events.sort(key=lambda event: event["rank"])
    equal, largest, first = True, 0.0, None
    for rank, event in enumerate(events):
        for name, values in event["values"].items():
            mine = numpy.array(values, "f4")
            reference = numpy.array(events[rank % parallel.model_size]["values"][name], "f4")
            if mine.tobytes() != reference.tobytes():
                equal, first = False, rank if first is None else first
                with numpy.errstate(invalid="ignore"):
                    gaps = numpy.abs(mine.astype("f8") - reference.astype("f8"))
                gaps[(mine == reference) | (numpy.isnan(mine) & numpy.isnan(reference))] = 0
                largest = max(largest, numpy.nan_to_num(gaps, nan=math.inf).max())
    assert {tuple(event["seen"]) for event in events} == {(equal, largest, first)}


def test_the_metrics_say_when_replicas_differ_by_how_much_and_that_they_heal(tmp_path: Path) -> None:
    """The struck element is 0.5 or more away from where it was, and the step after next forgets it."""
    (tmp_path / "own.py").write_text(FORGETFUL)
    faults = faults_of({"layer": ["model.2.bias"], "effect": "random", "bits": "exponent", "count": 1, "seed": 4})
    (run,) = train_all(
        [spec(f"{tmp_path}/own.py:OWN", "ddp:2", steps=6, probe_every=1, inject=faults, at=2, reach="rank:1")]
    )
    probes = run.of("replicas")
    assert [event["equal"] for event in probes] == [True, True, False, True, True, True]
    assert [event["max_abs_difference"] > 0 for event in probes] == [False, False, True, False, False, False]
    assert (run.replicas_differ_step, run.replicas_heal_step) == (3, 4)
    assert run.record()["replicas_heal_step"] == 4


def test_replicas_that_differ_and_do_not_heal_are_never_said_to() -> None:
    table = {"layer": ["model.fc1.bias"], "bits": "mantissa-msb", "count": 1}
    (run,) = train_all([mlp("ddp:2", 6, at=1, table=table, reach="rank:1", probe_every=2)])
    assert [(event["step"], event["equal"]) for event in run.of("replicas")] == [(2, False), (4, False), (6, False)]
    assert (run.replicas_differ_step, run.replicas_heal_step) == (2, None)


@pytest.mark.parametrize("layout", ["single", "fsdp:2", "tensor:2", "pipeline:2"])
@pytest.mark.parametrize("option", [{"probe_every": 1}, {"detect": ("replicas",)}])
def test_layouts_without_replicas_have_none_to_compare(layout: str, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^\S+ has no replicas to compare; ddp:N and hooks:N have$"):
        mlp(layout, **option)


def test_an_unknown_detector_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"^no detector 'smoke'; known: nonfinite-loss, loss-spike, "):
        mlp(detect=("smoke",))
