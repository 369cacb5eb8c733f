"""Cells are what the axes cross to, and a trial's seed knows neither layout, reach nor amount."""

import hashlib
from dataclasses import replace

import pytest

from flipper.campaigns.cells import Cell, cells_of, effective_reach, start_of, trial_seed
from flipper.campaigns.spec import Slice, Spec
from flipper.errors import UsageError


def spec(*slices: dict[str, object], **values: object) -> Spec:
    axes = tuple(
        Slice({axis: tuple(given) if isinstance(given, list) else (given,) for axis, given in part.items()})
        for part in slices
    )
    return Spec("s", axes, **{"recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2, **values})  # type: ignore[arg-type]


TWO = {"parallel": ["ddp:2", "pipeline:2"], "bits": ["sign", "exponent"], "count": [1, 10]}


def test_axes_are_crossed() -> None:
    cells = cells_of(spec(TWO))
    assert [cell.number for cell in cells] == list(range(8))
    assert {(c.parallel, c.axes["bits"], c.axes["count"]) for c in cells} == {
        (parallel, bits, count)
        for parallel in ("ddp:2", "pipeline:2") for bits in ("sign", "exponent") for count in (1, 10)
    }  # fmt: skip


def test_a_cell_that_two_slices_name_is_there_once_with_the_larger_number_of_trials() -> None:
    a = Slice({"parallel": ("ddp:2",), "count": (1, 10)}, 3)
    b = Slice({"parallel": ("ddp:2",), "count": (10,)}, 7)
    cells = cells_of(Spec("s", (a, b), recipe="digits-mlp", inject_epoch=1, epochs=2))
    assert [(cell.axes["count"], cell.trials) for cell in cells] == [(1, 3), (10, 7)]


def test_new_axis_values_leave_the_numbers_of_old_cells_as_they_are() -> None:
    before = {cell.key: cell.number for cell in cells_of(spec(TWO))}
    grown = cells_of(spec({**TWO, "bits": ["mantissa", "sign", "exponent"]}), before)
    after = {cell.key: cell.number for cell in grown}
    assert len(after) == 12
    assert all(after[key] == number for key, number in before.items())
    assert sorted(after.values()) == list(range(12))


def test_layouts_reaches_and_amounts_share_a_trials_seed() -> None:
    some = spec(
        {"parallel": ["ddp:2", "hooks:2"], "reach": ["all", "one"], "count": [1, 100], "bits": "sign"},
        {"parallel": "ddp:2", "ber": 1e-6, "bits": "sign"},
    )
    assert len({trial_seed(some, cell, 4) for cell in cells_of(some)}) == 1


@pytest.mark.parametrize(
    "other",
    [{"bits": "exponent"}, {"role": "parameter"}, {"layer": "fc1"}, {"effect": "set0"}, {"finite": True}],
)
def test_another_selection_or_drawing_has_another_seed(other: dict[str, object]) -> None:
    (one,), (two,) = cells_of(spec({"parallel": "ddp:2"})), cells_of(spec({"parallel": "ddp:2", **other}))
    assert trial_seed(spec({}), one, 0) != trial_seed(spec({}), two, 0)


def test_seed_epoch_training_seed_and_number_go_into_it() -> None:
    some = spec({"parallel": "ddp:2"}, training_seeds=(1, 2))
    (cell,) = cells_of(some)
    seeds = {
        trial_seed(some, cell, 0),
        trial_seed(some, cell, 1),
        trial_seed(some, cell, 2),
        trial_seed(replace(some, seed=1), cell, 0),
        trial_seed(replace(some, inject_epoch=2), cell, 0),
        trial_seed(replace(some, inject_epoch=None, inject_step=1), cell, 0),
        trial_seed(replace(some, training_seeds=(3, 2)), cell, 0),
    }
    assert len(seeds) == 7


def test_a_trials_seed_is_pinned_for_ever() -> None:
    some = spec({"parallel": "ddp:2", "bits": "exponent", "count": 1}, seed=1, training_seeds=(1, 2))
    (cell,) = cells_of(some)
    text = '1\0{"bits":"exponent"}\x001\x002\x003'  # seed, drawing, epoch, training seed, number
    by_hand = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    assert trial_seed(some, cell, 3) == by_hand == 11919078537764355130


def test_trials_go_round_the_training_seeds() -> None:
    some = spec({"parallel": "ddp:2"}, training_seeds=(5, 6, 7))
    (cell,) = cells_of(some)
    assert [start_of(some, cell, n).training_seed for n in range(7)] == [5, 6, 7, 5, 6, 7, 5]


@pytest.mark.parametrize(
    ("parallel", "reach", "effective"),
    [
        ("ddp:2", "one", "one"), ("hooks:2", "one", "one"), ("ddp:2+pipeline:2", "one", "one"),
        ("fsdp:2", "one", "all"), ("tensor:2", "one", "all"), ("pipeline:2", "one", "all"), ("single", "one", "all"),
        ("ddp:2", "rank:1", "rank:1"), ("ddp:2", "all", "all"),
    ],
)  # fmt: skip
def test_one_is_all_where_no_element_is_replicated(parallel: str, reach: str, effective: str) -> None:
    assert effective_reach(parallel, reach) == effective


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"parallel": "dpp:2"}, "no layout 'dpp:2'"),
        ({"parallel": "ddp:2", "count": 1, "ber": 1e-6}, "give exactly one amount"),
        ({"parallel": "ddp:2", "hours": 3}, "--fit and --hours go together"),
        ({"parallel": "ddp:2", "reach": "rank:5"}, "rank:5"),
        ({"parallel": "ddp:2", "bits": "exponents"}, "exponents"),
        ({"parallel": "ddp:2", "spread": "weighted"}, "--spread weighted and --weight"),
        ({"parallel": "ddp:2", "checkpoint": "a.pt"}, "goes with [commands]"),
    ],
)
def test_axes_that_cannot_be_crossed_are_told_with_their_cell(axes: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as error:
        cells_of(spec(axes))
    assert told in str(error.value)
    assert str(error.value).startswith("cell ")


def test_a_census_takes_single_faults_only() -> None:
    with pytest.raises(UsageError, match="strikes every eligible bit by itself"):
        cells_of(spec({"parallel": "ddp:2", "count": 10}, census=True))


def test_without_leaves_out_axes_and_order_does_not_matter() -> None:
    a = Cell(0, {"parallel": "ddp:2", "bits": "sign", "count": 1}, 1)
    b = Cell(1, {"count": 1, "bits": "sign", "parallel": "pipeline:2"}, 1)
    assert a.without("parallel") == b.without("parallel")
    assert a.key != b.key
