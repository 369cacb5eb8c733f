"""The page of a sweep over failure rates, of made-up results: what it says, and that it works in headless Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chromium_page import Page

from flipper.errors import OutputError
from flipper.failstop.costs import Costs
from flipper.failstop.failures import Trace
from flipper.failstop.simulate import SimulationSpec
from flipper.failstop.sweep import Point, Sweep
from flipper.report.trade_off import check_page, write_page
from flipper.training.spec import TrainSpec

MTBFS = (10.0, 100.0, 1000.0)
OVERHEADS = {"restart": (2.0, 0.4, 0.1), "rollback": (None, 0.3, 0.2), "lossy": (None, 0.2, 0.0)}
"""By strategy and MTBF; None: too few workers were left."""
LOSSES = {"restart": 0.0, "rollback": 0.0, "lossy": 0.004}


def record(strategy: str, overhead: float | None, seed: int) -> dict[str, Any]:
    ended = overhead is None
    return {
        "strategy": strategy,
        "failures": 3,
        "accuracy_loss": None if ended else LOSSES[strategy] * (1 + 0.1 * seed),
        "overhead_fraction": 0.05 if overhead is None else overhead * (1 + 0.01 * seed),
        "world_size_end": 5,
        "save_every": 12 if strategy == "restart" else None,
        "error": "fewer than 4 of 8 workers are left" if ended else None,
    }


def made_up(seeds: int, recipe: str = "digits-mlp") -> Sweep:
    spec = SimulationSpec(
        TrainSpec(recipe, steps=100, seed=1), 8, tuple(OVERHEADS), Trace(()), Costs(step=0.2, write=3.0), mtbf=10.0
    )
    points = tuple(
        Point(
            strategy,
            mtbf,
            tuple(record(strategy, OVERHEADS[strategy][number], seed) for seed in range(seeds)),
            tuple(record(strategy, OVERHEADS[strategy][number], seed) for seed in range(2 * seeds)),
        )
        for number, mtbf in enumerate(MTBFS)
        for strategy in OVERHEADS
    )
    return Sweep(spec, tuple(range(1, seeds + 1)), MTBFS, points)


@pytest.mark.parametrize("seeds", [1, 4])
def test_the_page_says_where_strategies_break_even(seeds: int, tmp_path: Path) -> None:
    """Rollback has less than restart at 100 s and more at 1,000 s: 0.1 less and 0.1 more, so halfway in between."""
    write_page(made_up(seeds), tmp_path / "page.html")
    text = re.sub(r"<[^>]+>", "", (tmp_path / "page.html").read_text())
    assert "Rollback against restart, overhead: they break even at an MTBF between 10.0 s and 100 s" in text
    assert re.search(r"at an MTBF of 316 s.*rollback has less at shorter MTBFs, restart at longer ones", text)
    assert "Rollback against lossy, overhead: no break-even: lossy has no more than rollback" in text
    assert ("Accuracy by 4 seeds, from 1 on; time by 8." if seeds == 4 else "Accuracy by 1 seed, from 1 on") in text
    assert f"{2 * seeds} of {2 * seeds}" in text  # that ended early


def test_it_works_in_a_browser_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror='window.bad = 1'>.py"
    evil.write_text("")
    write_page(made_up(3, f"{evil}:cnn"), tmp_path / "page.html")
    with Page(tmp_path / "profile") as page:
        page.size(1100, 900)
        page.open(tmp_path / "page.html")
        assert page.value("document.querySelectorAll('figure svg').length") == 2
        assert page.value("document.querySelectorAll('tbody tr').length") >= 9
        light = page.value("getComputedStyle(document.body).backgroundColor")
        page.prefer("dark")
        assert page.value("getComputedStyle(document.body).backgroundColor") != light
        page.size(390, 800, phone=True)
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value("window.bad === undefined")
        assert page.problems() == []
        assert page.requests() == [(tmp_path / "page.html").resolve().as_uri()]


def test_a_page_that_cannot_be_written_is_told_beforehand(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there is no folder"):
        check_page(tmp_path / "absent" / "page.html")
    with pytest.raises(OutputError, match="is a directory and is not replaced"):
        check_page(tmp_path)
    with pytest.raises(OutputError, match="names no file to write"):
        check_page(Path())
