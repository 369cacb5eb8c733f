"""Which ranks die when in a trial: drawn from its seed, fixed where axes say so, and checked before anything runs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flipper.campaigns.cells import cells_of, trial_seed
from flipper.campaigns.deaths import Strategy, deaths_of
from flipper.campaigns.spec import Spec, read_spec, spec_of
from flipper.errors import UsageError

DDP4 = {"parallel": "ddp:4"}


def spec_with(axes: dict[str, Any], **campaign: Any) -> Spec:
    usual = {"name": "deaths", "fault": "rank-loss", "recipe": "digits-mlp", "epochs": 2, "save_every": 8}
    document = {"campaign": {**usual, **campaign}, "axes": {"parallel": "ddp:4", "recovery": "lossy", **axes}}
    spec = spec_of(document)
    cells_of(spec)
    return spec


def drawn(axes: dict[str, Any], seeds: int, first: int = 1, last: int = 40, buckets: int = 3) -> list[Any]:
    return [deaths_of({**DDP4, **axes}, seed, first, last, buckets) for seed in range(seeds)]


def chance_of_chi_square(counts: Counter[Any], kinds: int) -> float:
    from scipy.stats import chisquare

    assert len(counts) <= kinds
    seen = [*counts.values(), *([0] * (kinds - len(counts)))]
    return float(chisquare(seen).pvalue)


def test_ranks_steps_and_points_are_drawn_uniformly() -> None:
    kills = [each for (each,) in drawn({}, 4000)]
    assert chance_of_chi_square(Counter(kill.rank for kill in kills), 4) > 1e-4
    assert chance_of_chi_square(Counter(kill.step for kill in kills), 40) > 1e-4
    assert chance_of_chi_square(Counter(kill.bucket for kill in kills), 4) > 1e-4  # before the step, or in a bucket


def test_a_range_of_steps_is_drawn_from_with_both_its_ends() -> None:
    steps = Counter(kill.step for (kill,) in drawn({"step": "7-9"}, 600))
    assert set(steps) == {7, 8, 9}
    assert chance_of_chi_square(steps, 3) > 1e-4


def test_what_is_fixed_stays_and_the_rest_is_as_drawn_without_it() -> None:
    free = drawn({}, 50)
    for (kill,), (other,) in zip(drawn({"rank": 2}, 50), free, strict=True):
        assert (kill.rank, kill.step, kill.bucket) == (2, other.step, other.bucket)
    for (kill,), (other,) in zip(drawn({"bucket": 1, "step": 5}, 50), free, strict=True):
        assert (kill.rank, kill.step, kill.bucket) == (other.rank, 5, 1)
    assert {kill.bucket for (kill,) in drawn({"bucket": "before"}, 20)} == {None}


def test_more_deaths_hold_the_fewer_and_no_rank_dies_twice() -> None:
    for one, two, three in zip(*(drawn({"deaths": count}, 100) for count in (1, 2, 3)), strict=True):
        assert set(one) < set(two) < set(three)
        assert len({kill.rank for kill in three}) == 3
        assert list(three) == sorted(three, key=lambda k: (k.step, -1 if k.bucket is None else k.bucket, k.rank))


def test_layouts_with_more_ranks_lose_theirs_at_the_same_steps() -> None:
    four = drawn({}, 50)
    eight = [deaths_of({"parallel": "ddp:8"}, seed, 1, 40, 3) for seed in range(50)]
    assert [kills[0].step for kills in four] == [kills[0].step for kills in eight]


def test_failures_by_mtbf_are_exponential_and_one_rank_is_spared() -> None:
    """Each of four ranks lives 4 x 50 steps on average, so that it fails within 40 with probability 1 - exp(-0.2)."""
    trials = 4000
    found = drawn({"mtbf": 50}, trials)
    share = sum(map(len, found)) / (4 * trials)
    expected = 1 - math.exp(-40 / 200)
    spread = math.sqrt(expected * (1 - expected) / (4 * trials))
    assert abs(share - expected) < 4.5 * spread + 0.0003  # the fourth of four is never lost, one in 900 draws
    steps = Counter((kill.step - 1) // 10 for kills in found for kill in kills)
    assert steps[0] > steps[3]
    assert {len(kills) for kills in drawn({"mtbf": 0.01}, 20)} == {3}
    assert max(kill.step for kills in found for kill in kills) == 40


def test_a_smaller_mtbf_brings_the_same_failures_earlier() -> None:
    for rare, often in zip(drawn({"mtbf": 100}, 200), drawn({"mtbf": 50}, 200), strict=True):
        assert len(rare) <= len(often)
        at = {kill.rank: kill.step for kill in often}
        assert all(at[kill.rank] <= kill.step for kill in rare)


def test_failures_of_wear_come_late_and_those_of_infancy_early() -> None:
    """With the same mean life, a Weibull shape of 4 has far fewer failures in a run's first part than 0.5 has."""
    early, late = (sum(map(len, drawn({"mtbf": 50, "shape": shape}, 500))) for shape in (0.5, 4))
    assert early > 5 * late


def test_draws_stay_what_they_are() -> None:
    assert list(map(str, deaths_of({**DDP4, "deaths": 2}, 12345, 1, 40, 3))) == PINNED
    assert list(map(str, deaths_of({**DDP4, "mtbf": 20}, 12345, 1, 40, 3))) == PINNED_MTBF


PINNED = ["rank:3@step:15", "rank:0@step:35:bucket:2"]
PINNED_MTBF = ["rank:1@step:34:bucket:2"]


def test_recoveries_layouts_and_amounts_share_a_trials_seed_and_kill_points_do_not() -> None:
    spec = spec_with(
        {"parallel": ["ddp:2", "ddp:4"], "recovery": ["restart", "restart:4", "rollback", "lossy"],
         "step": ["1-5", "6-9"]}
    )  # fmt: skip
    seeds = {(cell.axes["step"], trial_seed(spec, cell, 3)) for cell in cells_of(spec)}
    assert len(seeds) == 2
    amounts = spec_with({"deaths": [1, 2, 3]})
    assert len({trial_seed(amounts, cell, 3) for cell in cells_of(amounts)}) == 1


def test_a_restart_may_say_how_often_it_saves() -> None:
    assert Strategy.of({"recovery": "restart:12"}, 8) == Strategy("restart", 12)
    assert Strategy.of({"recovery": "restart"}, 8) == Strategy("restart", 8)
    assert Strategy.of({"recovery": "lossy"}, 8) == Strategy("lossy", 0)


@pytest.mark.parametrize("where", ["campaign", "axes", "slices"])
def test_the_fault_may_stand_with_the_axes(where: str) -> None:
    table: dict[str, Any] = {
        "campaign": {"name": "deaths", "recipe": "digits-mlp", "epochs": 2},
        "axes": {"parallel": "ddp:2"},
        "slices": [{"recovery": "lossy"}, {"recovery": "rollback"}],
    }
    for part in table["slices"] if where == "slices" else [table[where]]:
        part["fault"] = "rank-loss"
    assert spec_of(table).fault == "rank-loss"


@pytest.mark.parametrize(
    ("axes", "campaign", "told"),
    [
        ({"bits": "sign"}, {}, "axes: bits = 'sign' goes with campaign.fault = 'bit-flip', and here that is"),
        ({"recovery": "undo"}, {}, "axes: recovery is 'undo'; it must be restart, restart:N"),
        ({"recovery": "restart:0"}, {}, "axes: recovery is 'restart:0'; it must be restart, restart:N"),
        ({"recovery": "restart"}, {"save_every": 0}, "restart needs checkpoints: say by campaign.save_every"),
        ({"recovery": "lossy", "parallel": "tensor:2"}, {}, "works under ddp:N and mpi:N, not under tensor:2"),
        ({"parallel": "single", "recovery": "restart"}, {}, "needs 2 ranks or more, and single has 1"),
        ({"rank": -1}, {}, "axes: rank is -1; it must be a whole number from 0"),
        ({"rank": True}, {}, "axes: rank is True; it must be a whole number from 0"),
        ({"rank": 4}, {}, "rank = 4: ddp:4 has ranks 0 to 3"),
        ({"rank": 1, "deaths": 2}, {}, "a rank dies only once; leave rank out"),
        ({"step": "9-7"}, {}, "axes: step is '9-7'; it must be a whole number from 1, or a range such as"),
        ({"step": 0}, {}, "axes: step is 0; it must be a whole number from 1"),
        ({"bucket": "after"}, {}, "axes: bucket is 'after'; it must be a whole number from 0, or \"before\""),
        ({"bucket": 0, "parallel": "hooks:2", "recovery": "restart"}, {}, "under hooks:2 ranks die before a step"),
        ({"deaths": 4}, {}, "deaths = 4: ddp:4 has 4 ranks, of which one must be left"),
        ({"mtbf": 0}, {}, "axes: mtbf is 0; it must be a number of steps above 0"),
        ({"mtbf": "2h"}, {}, "axes: mtbf is '2h'; it must be a number of steps above 0"),
        ({"mtbf": 9, "step": 3}, {}, "mtbf = 9 draws who dies, and when: leave step out"),
        ({"shape": 2}, {}, "shape = 2 is that of the distribution whose mean is mtbf: give both"),
        ({"mtbf": 9, "shape": 100}, {}, "axes: shape is 100; it must be a number from 0.01, below 100"),
        ({"mtbf": 9, "shape": 0.005}, {}, "axes: shape is 0.005; it must be a number from 0.01, below 100"),
        ({"mtbf": 10**400}, {}, "it must be a number of steps above 0"),
        ({"world_batch": "huge"}, {}, "axes: world_batch is 'huge'; it must be fixed or per-rank"),
        ({"min_ranks": 5}, {}, "--min-ranks 5: the layout has 4 ranks"),
        ({"reach": "one"}, {}, "axes: reach = 'one' goes with campaign.fault = 'bit-flip'"),
        ({"steps": 4}, {}, "no axis of axes 'steps'; did you mean step?"),
        ({}, {"fault": "fire"}, "campaign.fault must be 'bit-flip' or 'rank-loss', not 'fire'"),
        ({"fault": "bit-flip"}, {}, "fault is 'rank-loss' and 'bit-flip': one kind in a campaign"),
        ({"fault": ["bit-flip", "rank-loss"]}, {}, "are campaigns of their own"),
        ({}, {"trials": "all"}, "campaign.trials = \"all\" goes with fault = 'bit-flip'"),
        ({}, {"fit": 50}, "campaign.fit = 50 is a rate of bit flips; deaths have the axis mtbf"),
        ({}, {"inject_epoch": 2}, "nothing would be trained"),
        ({}, {"inject_epoch": 1, "inject_step": 3}, "give campaign.inject_epoch or campaign.inject_step, not both"),
        ({}, {"save_every": -3}, "campaign.save_every is negative: -3"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_told(axes: dict[str, Any], campaign: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        spec_with(axes, **campaign)
    assert told in str(error.value)


@pytest.mark.parametrize("axis", ["recovery", "mtbf", "step"])
def test_axes_of_deaths_are_refused_where_bits_flip(axis: str) -> None:
    table = {"name": "flips", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2}
    with pytest.raises(UsageError, match=f"axes: {axis} = 3 goes with campaign.fault = 'rank-loss'"):
        spec_of({"campaign": table, "axes": {"parallel": "ddp:2", axis: 3}})
    with pytest.raises(UsageError, match=r"campaign\.save_every goes with fault = 'rank-loss'"):
        spec_of({"campaign": {**table, "save_every": 3}, "axes": {"parallel": "ddp:2"}})


def test_a_recovery_must_be_named() -> None:
    table = {"name": "deaths", "fault": "rank-loss", "recipe": "digits-mlp", "epochs": 2}
    with pytest.raises(UsageError, match="an axis recovery is missing: restart, restart:N"):
        cells_of(spec_of({"campaign": table, "axes": {"parallel": "ddp:2"}}))


@pytest.mark.parametrize(
    ("axes", "told"), [({"step": "30-41"}, "step = '30-41': trials have the steps 1 to 40"),
                       ({"bucket": 3}, "bucket = 3: the model has 3 buckets, 0 to 2")],
)  # fmt: skip
def test_a_point_that_the_run_does_not_have_is_told(axes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        drawn(axes, 1)
    assert told in str(error.value)


def test_the_shipped_campaign_is_in_order() -> None:
    spec = read_spec(Path(__file__).parents[2] / "scripts" / "campaigns" / "failstop.toml")
    assert spec.fault == "rank-loss"
    assert len(cells_of(spec)) == 15
