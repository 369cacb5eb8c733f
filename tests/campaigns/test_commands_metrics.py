"""What commands tell of themselves: JSON lines, CSV, printed lines; numbers of other languages; what can't be used."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flipper.campaigns.metrics_files import (
    Metrics,
    Series,
    aligned,
    blind_spot,
    complaint,
    metrics_of,
    read_series,
)
from flipper.errors import UsageError

FULL = {"format": "stdout", "pattern": r"step (?P<step>\d+) loss (?P<loss>[-+.\w]+)( acc (?P<accuracy>[-+.\w]+))?"}


def read(text: str, table: dict[str, Any], tmp: Path, metric: str = "accuracy", whole: bool = True) -> Series:
    path = tmp / "metrics"
    path.write_bytes(text.encode())
    return read_series(metrics_of(table, metric), [path], whole)


def losses(series: Series) -> dict[int, float]:
    return {step: loss for step, (loss, _) in series.steps.items()}


def metrics(series: Series) -> dict[int, float]:
    return {step: metric for step, (_, metric) in series.evals.items()}


def test_json_lines_with_any_keys_beside(tmp_path: Path) -> None:
    text = (
        '{"step": 10, "loss": 0.5, "lr": 0.1, "nested": {"a": [1]}}\n\n'
        '{"step": 20, "loss": "0.25", "accuracy": 0.75}\r\n'
        '{"accuracy": 0.8}\n{"time": 3}'
    )
    series = read(text, {}, tmp_path)
    assert losses(series) == {10: 0.5, 20: 0.25}
    assert metrics(series) == {20: 0.8}
    assert (series.loss, series.metric, series.last_step, series.problems) == (0.25, 0.8, 20, [])


def test_names_are_those_of_the_table(tmp_path: Path) -> None:
    table = {"step": "iteration", "loss": "train/loss", "metric": "val acc"}
    text = '{"iteration": 1, "train/loss": 2, "val acc": 3, "step": 9, "loss": 9, "accuracy": 9}\n'
    series = read(text, table, tmp_path)
    assert (losses(series), metrics(series)) == ({1: 2.0}, {1: 3.0})


def test_flippers_own_events_are_understood(tmp_path: Path) -> None:
    """The loss of an evaluation is no training loss, and replicas' evaluations are not the run's."""
    events = [
        {"event": "start", "step": 4, "epoch": 1},
        {"event": "step", "step": 5, "loss": 0.5, "grad_norm": 1.5},
        {"event": "eval", "step": 5, "loss": 0.7, "accuracy": 0.9},
        {"event": "eval", "step": 5, "loss": 0.8, "accuracy": 0.1, "replica": 1},
        {"event": "replicas", "step": 5, "equal": False, "max_abs_difference": 0.125},
        {"event": "detect", "detector": "loss", "step": 5, "rank": 1, "value": 3},
        {"event": "saved", "step": 5, "path": "x"},
        {"event": "end", "step": 5, "state_digest": "x", "seconds": 1},
    ]
    series = read("".join(json.dumps(each) + "\n" for each in events), {}, tmp_path)
    assert series.steps == {5: (0.5, 1.5)}
    assert series.evals == {5: (0.7, 0.9)}
    assert (series.first, series.replicas, series.detected) == (4, [(5, 0.125)], [("loss", 5, 1)])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NaN", math.nan), ("nan", math.nan), ("-nan", math.nan), ("+nan", math.nan), ('"NaN"', math.nan),
        ("Infinity", math.inf), ("inf", math.inf), ("-inf", -math.inf), ("-Infinity", -math.inf), ("INF", math.inf),
        ('"-Infinity"', -math.inf), ('"nan"', math.nan), ("1e400", math.inf), ('"1.5e+30"', 1.5e30), ("7", 7.0),
    ],
)  # fmt: skip
def test_numbers_as_other_languages_write_them(tmp_path: Path, written: str, meant: float) -> None:
    series = read(f'{{"step":1,"loss":{written},"accuracy":0.5}}\n', {}, tmp_path)
    assert series.problems == []
    assert losses(series)[1] == pytest.approx(meant, nan_ok=True)
    series = read(f"step,loss,accuracy\n1,{written},0.5\n", {"format": "csv"}, tmp_path)
    assert losses(series)[1] == pytest.approx(meant, nan_ok=True)
    series = read("x step 1 loss {} acc 0.5 y\n".format(written.strip('"')), FULL, tmp_path)
    assert losses(series)[1] == pytest.approx(meant, nan_ok=True)


def test_words_that_hold_nan_are_no_numbers(tmp_path: Path) -> None:
    series = read('{"step":1,"loss":nan,"accuracy":0.5,"name":"a nan, b inf }"}\n', {}, tmp_path)
    assert series.problems == []
    assert math.isnan(losses(series)[1])


def test_csv_with_quotes_gaps_other_delimiters_and_repeated_headers(tmp_path: Path) -> None:
    text = 'step,loss,note,accuracy\n1, 0.5 ,"a, ""b""\nc",\n2,,,0.75\nstep,loss,note,accuracy\n3,0.25,x,0.5\n'
    series = read(text, {"format": "csv"}, tmp_path)
    assert losses(series) == {1: 0.5, 3: 0.25}
    assert metrics(series) == {2: 0.75, 3: 0.5}
    assert series.lines == {1, 2, 3}
    for mark in "\t;":
        series = read(text.replace(",", mark), {"format": "csv"}, tmp_path)
        assert (losses(series), metrics(series)) == ({1: 0.5, 3: 0.25}, {2: 0.75, 3: 0.5})


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("step,loss,accuracy\n1,0.5,0.25\n", {"format": "csv"}),
        ('{"step":1,"loss":0.5,"accuracy":0.25}\n', {}),
        ("step 1 loss 0.5 acc 0.25\n", {**FULL, "pattern": "^" + FULL["pattern"]}),
    ],
    ids=["csv", "jsonl", "stdout"],
)
def test_a_byte_order_mark_is_no_part_of_what_is_told(tmp_path: Path, text: str, table: dict[str, Any]) -> None:
    series = read("\ufeff" + text, table, tmp_path)
    assert (losses(series), metrics(series), series.problems) == ({1: 0.5}, {1: 0.25}, [])


def test_a_bar_that_is_drawn_over_and_over_is_read_line_by_line(tmp_path: Path) -> None:
    text = "\rstep 1 loss 3\rstep 2 loss 2\r\nnoise\nstep 3 loss 1 acc 0.5\n"
    series = read(text, FULL, tmp_path)
    assert losses(series) == {1: 3.0, 2: 2.0, 3: 1.0}
    assert metrics(series) == {3: 0.5}


def test_lines_without_a_number_of_their_own_are_counted(tmp_path: Path) -> None:
    table = {"format": "stdout", "pattern": [r"loss=(?P<loss>\S+)", r"val=(?P<accuracy>\S+)"]}
    series = read("loss=3\nloss=2\nval=0.5\nloss=1\nval=0.7", table, tmp_path)
    assert losses(series) == {1: 3.0, 2: 2.0, 3: 1.0}
    assert metrics(series) == {2: 0.5, 3: 0.7}


@pytest.mark.parametrize("table", [{}, {"format": "csv"}, FULL], ids=["jsonl", "csv", "stdout"])
def test_a_torn_last_line_of_a_killed_run_is_left_out(tmp_path: Path, table: dict[str, Any]) -> None:
    rows = [(1, 0.5, 0.25), (2, 0.123456, 0.5)]
    match table.get("format", "jsonl"):
        case "jsonl":
            text = "".join(json.dumps({"step": s, "loss": v, "accuracy": a}) + "\n" for s, v, a in rows)
        case "csv":
            text = "step,accuracy,loss\n" + "".join(f"{s},{a},{v}\n" for s, v, a in rows)
        case _:
            text = "".join(f"step {s} loss {v} acc {a}\n" for s, v, a in rows)
    for cut in range(1, 6):
        torn = read(text[:-cut], table, tmp_path, whole=False)
        assert losses(torn) == {1: 0.5}
        assert torn.problems == []
    assert losses(read(text[:-1], table, tmp_path)) == {1: 0.5, 2: 0.123456}


def test_a_later_line_of_the_same_step_is_the_one_that_counts(tmp_path: Path) -> None:
    series = read('{"step":1,"loss":9}\n{"step":1,"loss":2,"accuracy":1}\n{"step":1,"accuracy":3}\n', {}, tmp_path)
    assert (losses(series), metrics(series), series.back) == ({1: 2.0}, {1: 3.0}, None)


def test_without_losses_the_metric_stands_for_them(tmp_path: Path) -> None:
    series = read('{"step":1,"accuracy":0.5}\n{"step":2,"accuracy":NaN}\n', {}, tmp_path)
    assert math.isnan(series.loss or 0)


def test_several_files_of_a_glob_are_one_series(tmp_path: Path) -> None:
    for number, values in enumerate(([1, 2], [3])):
        lines = [json.dumps({"step": v, "loss": v, "accuracy": 0}) for v in values]
        (tmp_path / f"part{number}.jsonl").write_text("\n".join(lines))
    series = read_series(Metrics(), [*sorted(tmp_path.glob("*.jsonl")), tmp_path / "gone"])
    assert losses(series) == {1: 1.0, 2: 2.0, 3: 3.0}


@given(st.lists(st.tuples(st.floats(), st.none() | st.floats()), min_size=1, max_size=8))
def test_what_json_writes_is_read_as_it_was(rows: list[tuple[float, float | None]]) -> None:
    text = "".join(json.dumps({"step": n, "loss": a, "accuracy": b}) + "\n" for n, (a, b) in enumerate(rows))
    with tempfile.TemporaryDirectory() as folder:
        series = read(text, {}, Path(folder))
    assert [repr(loss) for loss, _ in series.steps.values()] == [repr(a) for a, _ in rows]
    wanted = {n: repr(b) for n, (_, b) in enumerate(rows) if b is not None}
    assert {step: repr(metric) for step, (_, metric) in series.evals.items()} == wanted


@pytest.mark.parametrize(
    ("text", "table", "problem"),
    [
        ("", {}, "it told of no 'accuracy' (it told nothing); metrics.metric, or campaign.metric, names another"),
        ('{"step":1,"loss":1,"acc":1}\n', {}, "it told of no 'accuracy' (seen: step, loss, acc); metrics.metric"),
        ('{"it":1,"loss":1,"accuracy":1}\n', {}, "it told of no 'step' (seen: it, loss, accuracy); metrics.step"),
        ('{"step":1,"accuracy":1}\n', {"loss": "train"}, "it told of no 'train' (seen: step, accuracy)"),
        ("{}\nwarning: x\n", {}, "line 2 of its metrics is no JSON object: 'warning: x'"),
        ("[" * 100_000 + "\n", {}, "line 1 of its metrics is no JSON object: '[["),
        ('{"step":' + "[" * 100_000 + "\n", {}, "line 1 of its metrics is no JSON object: '{\"step\":[[["),
        ("[1, 2]\n", {}, "line 1 of its metrics is no JSON object: '[1, 2]'"),
        ('{"step":1.5,"loss":1}\n', {}, "line 1 of its metrics: its step is 1.5, not a whole number"),
        ('{"step":1,"loss":"low"}\n', {}, "line 1 of its metrics: could not convert string to float: 'low'"),
        ('{"step":1,"loss":true}\n', {}, "line 1 of its metrics: True is no number"),
        ('{"step":1,"loss":[1]}\n', {}, "line 1 of its metrics: [1] is no number"),
        ('{"step":NaN,"loss":1}\n', {}, "line 1 of its metrics: its step is nan, not a whole number"),
        ('{"step":-Infinity,"loss":1}\n', {}, "line 1 of its metrics: its step is -inf, not a whole number"),
        ('{"step":1e20,"loss":1}\n', {}, "line 1 of its metrics: its step is 1e+20, not a whole number of at most 2**"),
        ('{"step":9007199254740994,"loss":1}\n', {}, "line 1 of its metrics: its step is 9007199254740994, not a "),
        ("step,loss\n1e300,1\n", {"format": "csv"}, "line 2 of its metrics: its step is '1e300', not a whole number"),
        ('{}\n{"event":"replicas","step":1}\n', {}, "line 2 of its metrics: its event 'replicas' has no "
         "'max_abs_difference'; give 'max_abs_difference', or call the event "),
        ('{"event":"replicas","max_abs_difference":[1]}\n', {}, "line 1 of its metrics: [1] is no number"),
        ('{"event":"detect","step":3}\n', {}, "line 1 of its metrics: its event 'detect' has no 'detector'; give "
         "'detector' and 'rank', or call the event otherwise"),
        ('{"event":"detect","detector":"x"}\n', {}, "line 1 of its metrics: its event 'detect' has no 'rank'; give"),
        ('{"event":"detect","detector":7,"rank":0}\n', {}, "line 1 of its metrics: its detector is 7, not a text"),
        ('{"event":"detect","detector":"x","rank":0.5}\n', {}, "line 1 of its metrics: its rank is 0.5, not a whole"),
        ('{"event":"detect","detector":"x","rank":null}\n', {}, "line 1 of its metrics: its rank is None, not a "),
        ('{"event":"detect","detector":"x","rank":{}}\n', {}, "line 1 of its metrics: {} is no number"),
        ('{"event":"start","step":"x"}\n', {}, "line 1 of its metrics: could not convert string to float: 'x'"),
        ("step,loss\n1,high\n", {"format": "csv"}, "line 2 of its metrics: could not convert string to float: 'high'"),
        ("epoch 1\n", FULL, "it told of no 'accuracy' (no line that it printed matches metrics.pattern)"),
        ("step 1 loss 1.a acc 1\n", FULL, "line 1 of what it printed: could not convert string to float: '1.a'"),
        ('{"step":2,"loss":1,"accuracy":1}\n{"step":1,"loss":1}\n', {},
         "its steps go back from 2 to 1; metrics.step is to name a count that only grows"),
        ('{"step":1,"loss":NaN,"accuracy":1}\n', {}, "its last loss is nan"),
        ('{"step":1,"loss":1,"accuracy":Infinity}\n', {}, "its last accuracy is inf"),
    ],
)  # fmt: skip
def test_a_clean_run_that_cannot_be_compared_with_says_why(
    tmp_path: Path, text: str, table: dict[str, Any], problem: str
) -> None:
    found = complaint(metrics_of(table, "accuracy"), read(text, table, tmp_path))
    assert found is not None
    assert found.startswith(problem)


def test_a_good_series_has_no_complaint(tmp_path: Path) -> None:
    good = '{"step":1,"loss":1}\n{"step":2,"loss":1}\n{"step":1,"accuracy":0.5}\n{"step":2,"accuracy":0.5}\n'
    assert complaint(Metrics(), read(good, {}, tmp_path)) is None
    assert complaint(metrics_of(FULL, "accuracy"), read("step 1 loss 2 acc 3\n", FULL, tmp_path)) is None


@pytest.mark.parametrize(
    ("group", "missed"),
    [(r"[\d.]+", "nan"), (r"\d+\.\d+", "nan"), (r"[\d.]+|nan", "inf"), (r"nan|inf|[\d.]+", "1.5e+30"),
     (r"[-+.\w]+", None), (r"\S+", None)],
)  # fmt: skip
def test_patterns_that_would_overlook_a_run_that_breaks_down_are_found(group: str, missed: str | None) -> None:
    table = {"format": "stdout", "pattern": rf"step (?P<step>\d+): (?P<loss>{group}) (?P<accuracy>\S+)"}
    problem = blind_spot(metrics_of(table, "accuracy"), "hello\nstep 1: 0.25 0.9\n")
    if missed is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith(
            f"metrics.pattern does not read a loss of {missed} in a line like 'step 1: 0.25 0.9', so a run that breaks "
        )
        assert r"(?P<loss>[-+.\w]+)" in problem


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"fromat": "csv"}, "no key of [metrics] 'fromat'; known: format, pattern, file, step, loss, metric"),
        ({"format": "tsv"}, "no metrics.format 'tsv'; known: jsonl, csv, stdout"),
        ({"step": 3}, "metrics.step must be a text, not 3"),
        ({"pattern": []}, "metrics.pattern must be a text or a list of texts, not []"),
        ({"format": "stdout", "pattern": ["a", 1]}, "metrics.pattern must be a text or a list of texts, not ['a', 1]"),
        ({"format": "stdout"}, 'metrics.format = "stdout" needs metrics.pattern: a regular expression with named'),
        ({"pattern": "x"}, "metrics.pattern goes with metrics.format = \"stdout\", not 'jsonl'"),
        ({"format": "stdout", "pattern": "(?P<loss>x"}, "metrics.pattern '(?P<loss>x' is no regular expression: "),
        ({"format": "stdout", "pattern": r"(?P<los>\S+)"},
         "metrics.pattern has a group 'los'; known: step, loss, accuracy"),
        ({"format": "stdout", "pattern": r"(?P<loss>\S+)"},
         r"metrics.pattern has no group 'accuracy', the metric that is compared: (?P<accuracy>[-+.\w]+)"),
        ({"format": "stdout", "pattern": r"(?P<accuracy>\S+)", "file": "x"}, "metrics.file goes with metrics.format"),
        ({"file": "/tmp/x"}, "metrics.file is '/tmp/x'; it must be a name or glob in the run's own folder"),
    ],
)  # fmt: skip
def test_a_table_that_is_wrong_is_refused_with_what_is_allowed(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        metrics_of(table, "accuracy")
    assert message in str(caught.value)


def test_values_that_a_run_leaves_out_are_nan_and_one_that_stops_early_keeps_its_last() -> None:
    series = Series(evals={1: (0.0, 0.5), 2: (0.0, 0.75)}, lines={1, 2, 3})
    golden = {1: 0.5, 2: 0.75, 3: 0.875, 4: 0.9}
    found = aligned(series, golden, ended_well=False)
    assert list(found) == [1, 2, 3]
    assert math.isnan(found[3][1])
    found = aligned(Series(evals=series.evals, lines={1, 2}), golden, ended_well=True)
    assert {step: metric for step, (_, metric) in found.items()} == {1: 0.5, 2: 0.75, 4: 0.75}
    assert aligned(Series(), golden, ended_well=True) == {}
    assert list(aligned(series, {}, ended_well=True)) == [1, 2]
