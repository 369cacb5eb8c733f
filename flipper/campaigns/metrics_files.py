"""Metrics files: what a user's own training tells of itself, as JSON lines, CSV, or lines that it prints."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flipper.errors import UsageError

FORMATS: Final = ("jsonl", "csv", "stdout")

KEYS: Final = ("format", "pattern", "file", "step", "loss", "metric")

NUMBER: Final = r"[-+.\w]+"
"""A group that takes every way to print a number: 0.25, 1e-3, nan, -inf."""

MOST: Final = 2**53
"""Of steps and ranks: greater whole numbers are not told apart by a float, as which JSON and CSV may write them."""

_EVENTS: Final = {"replicas": ("max_abs_difference",), "detect": ("detector", "rank")}
"""What flipper's own events must have, beside the step."""

_ODD: Final = ("nan", "inf", "1.5e+30")
"""Losses that a struck run may print, and a clean one doesn't."""

_BARE: Final = re.compile(r"(?<=[:\s,\[])(?:(-)(?!nan)|[-+])?(nan|inf(?:inity)?)(?=[\s,}\]])", re.IGNORECASE)


@dataclass(frozen=True)
class Metrics:
    """How a command tells its progress: the table [metrics].

    patterns: of `stdout`, each tried on every line. file: a glob in the run's own folder; None for {metrics}.
    step, loss, metric: the keys, columns or groups of these.
    """

    format: str = "jsonl"
    patterns: tuple[str, ...] = ()
    file: str | None = None
    step: str = "step"
    loss: str = "loss"
    metric: str = "accuracy"

    @property
    def in_file(self) -> bool:
        """Whether they are where {metrics} says."""
        return self.format != "stdout" and self.file is None


def metrics_of(table: Mapping[str, Any], metric: str) -> Metrics:
    """The table [metrics], checked; metric: what campaign.metric calls what is compared. Raises UsageError."""
    for key, value in table.items():
        if key not in KEYS:
            raise UsageError(f"no key of [metrics] {key!r}; known: {', '.join(KEYS)}")
        several = key == "pattern" and isinstance(value, list | tuple) and value
        if not all(isinstance(each, str) and each for each in (value if several else [value])):
            raise UsageError(f"metrics.{key} must be a text{' or a list of texts' * (key == 'pattern')}, not {value!r}")
    found = table.get("format", "jsonl")
    if found not in FORMATS:
        raise UsageError(f"no metrics.format {found!r}; known: {', '.join(FORMATS)}")
    if (found == "stdout") != ("pattern" in table):
        if "pattern" in table:
            raise UsageError(f'metrics.pattern goes with metrics.format = "stdout", not {found!r}')
        raise UsageError(
            'metrics.format = "stdout" needs metrics.pattern: a regular expression with named groups, such as '
            rf"'step (?P<step>\d+) loss (?P<loss>{NUMBER})'"
        )
    if found == "stdout" and "file" in table:
        raise UsageError('metrics.file goes with metrics.format "jsonl" or "csv"')
    if Path(table.get("file", "")).is_absolute():
        raise UsageError(f"metrics.file is {table['file']!r}; it must be a name or glob in the run's own folder")
    given = table.get("pattern", ())
    metrics = Metrics(
        found, (given,) if isinstance(given, str) else tuple(given), table.get("file"),
        **{key: table[key] for key in ("step", "loss") if key in table}, metric=table.get("metric", metric),
    )  # fmt: skip
    _check_patterns(metrics)
    return metrics


def _check_patterns(metrics: Metrics) -> None:
    groups: set[str] = set()
    for pattern in metrics.patterns:
        try:
            groups |= re.compile(pattern).groupindex.keys()
        except re.error as error:
            raise UsageError(f"metrics.pattern {pattern!r} is no regular expression: {error}") from error
    known = (metrics.step, metrics.loss, metrics.metric)
    if unknown := sorted(groups - set(known)):
        raise UsageError(f"metrics.pattern has a group {unknown[0]!r}; known: {', '.join(known)}")
    if metrics.patterns and metrics.metric not in groups:
        raise UsageError(
            f"metrics.pattern has no group {metrics.metric!r}, the metric that is compared: "
            f"(?P<{metrics.metric}>{NUMBER}); campaign.metric or metrics.metric names another"
        )


@dataclass
class Series:
    """What a run has told. steps: step -> training loss, gradient norm. evals: step -> loss, metric.

    first: the step that it began after, where it says so. lines: steps that it had a line for, whatever that said.
    seen: names it used. problems: what could not be read. back: (step, a lower one that came after it).
    """

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    evals: dict[int, tuple[float, float]] = field(default_factory=dict)
    replicas: list[tuple[int, float]] = field(default_factory=list)
    detected: list[tuple[str, int, int]] = field(default_factory=list)
    first: int | None = None
    last_step: int = 0
    lines: set[int] = field(default_factory=set)
    seen: dict[str, None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    back: tuple[int, int] | None = None

    @property
    def empty(self) -> bool:
        """Whether it told of no step and no evaluation."""
        return not self.steps and not self.evals

    @property
    def loss(self) -> float | None:
        """The last training loss; where there are none at all, the last metric."""
        if self.steps:
            return self.steps[max(self.steps)][0]
        return self.metric

    @property
    def metric(self) -> float | None:
        """The last value of the metric."""
        return self.evals[max(self.evals)][1] if self.evals else None


def read_series(metrics: Metrics, files: Iterable[Path], whole: bool = True) -> Series:
    """All that a run has told. files: of metrics, or what it printed; ones that aren't there are empty.

    whole: the run came to its end; else a last line without its line feed may be torn and is left out.
    """
    series = Series()
    for path in files:
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8-sig", "replace")
        if not whole:
            text = text[: text.rfind("\n") + 1]
        for where, row in _rows(metrics, text, series):
            try:
                _take(series, metrics, row)
            except (ValueError, TypeError, OverflowError) as error:
                series.problems.append(f"{where}: {error}")
    return series


def _rows(metrics: Metrics, text: str, series: Series) -> Iterator[tuple[str, dict[str, Any]]]:
    """What stands in each line, by name, and which line that is."""
    match metrics.format:
        case "jsonl":
            yield from _json_rows(text, series)
        case "csv":
            yield from _csv_rows(text, series)
        case _:
            for number, line in enumerate(_printed(text), 1):
                for pattern in metrics.patterns:
                    if (match := re.search(pattern, line)) is not None:
                        row = {name: value for name, value in match.groupdict().items() if value is not None}
                        yield f"line {number} of what it printed", row


def _printed(text: str) -> list[str]:
    """Lines; a bar that is drawn over and over is one each time."""
    return re.split(r"\r\n|\r|\n", text)


def _json_rows(text: str, series: Series) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = _json(line)
        except (ValueError, RecursionError):  # the latter where it nests too deep
            row = None
        if isinstance(row, dict):
            yield f"line {number} of its metrics", row
        else:
            series.problems.append(f"line {number} of its metrics is no JSON object: {line.strip()[:80]!r}")


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # other languages print nan and inf as such
        spelt = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity"}
        return json.loads(_BARE.sub(lambda match: (match[1] or "") + spelt[match[2].lower()], line))


def _csv_rows(text: str, series: Series) -> Iterator[tuple[str, dict[str, Any]]]:
    header = text.split("\n", 1)[0]
    delimiter = max(",\t;", key=header.count)
    names: list[str] = []
    try:
        for number, cells in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 1):
            cells = [cell.strip() for cell in cells]
            if not names:
                names = cells
            elif cells != names:  # a program that goes on with a file may write its header again
                yield f"line {number} of its metrics", {n: c for n, c in zip(names, cells, strict=False) if c}
    except csv.Error as error:
        series.problems.append(f"its metrics are no CSV: {error}")


def _take(series: Series, metrics: Metrics, row: Mapping[str, Any]) -> None:
    """Add what one line says; raises ValueError or TypeError where that is no number."""
    series.seen.update(dict.fromkeys(row))
    event = row.get("event")
    step = _step(series, metrics, row)
    if event == "start" and "step" in row:
        series.first = step
    elif event == "replicas":
        series.replicas.append((step, _number(_needed(row, "max_abs_difference"))))
    elif event == "detect":
        series.detected.append((_text(row, "detector"), step, _whole("rank", _needed(row, "rank"))))
    elif event != "eval" or not row.get("replica"):
        _take_numbers(series, metrics, row, step)


def _take_numbers(series: Series, metrics: Metrics, row: Mapping[str, Any], step: int) -> None:
    event, loss, value = row.get("event"), row.get(metrics.loss), row.get(metrics.metric)
    series.lines.add(step)
    series.last_step = step
    if loss is not None and event != "eval":
        _add(series, series.steps, step, (_number(loss), _number(row.get("grad_norm"))))
    if value is not None and event != "step":
        _add(series, series.evals, step, (_number(loss), _number(value)))


def _add(series: Series, to: dict[int, tuple[float, float]], step: int, values: tuple[float, float]) -> None:
    last = next(reversed(to), step)
    if step < last and series.back is None:
        series.back = last, step
    to[step] = values


def _step(series: Series, metrics: Metrics, row: Mapping[str, Any]) -> int:
    """The step of a line; one that names none belongs to the last, and where none ever does, losses are counted."""
    if row.get(metrics.step) is not None:
        return _whole(metrics.step, row[metrics.step])
    counted = metrics.format == "stdout" and metrics.step not in series.seen and metrics.loss in row
    return series.last_step + (1 if counted else 0)


def _needed(row: Mapping[str, Any], name: str) -> Any:
    """What an event of flipper's own must have; raises ValueError where it has not."""
    if name not in row:
        wanted = " and ".join(map(repr, _EVENTS[row["event"]]))
        raise ValueError(f"its event {row['event']!r} has no {name!r}; give {wanted}, or call the event otherwise")
    return row[name]


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _needed(row, name)
    if not isinstance(value, str):
        raise ValueError(f"its {name} is {_cut(value)}, not a text")
    return value


def _whole(name: str, given: Any) -> int:
    """A whole number however it is written; raises ValueError saying whose it is."""
    value = _number(given)
    if not abs(value) <= MOST or value != int(value):  # nor is NaN
        raise ValueError(f"its {name} is {_cut(given)}, not a whole number of at most 2**53")
    return int(value)


def _number(value: Any) -> float:
    """A number however it is written; nothing at all is NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        raise ValueError(f"{_cut(value)} is no number")
    return math.nan if value is None else float(value)


def _cut(value: Any) -> str:
    return f"{value!r}"[:80]


def complaint(metrics: Metrics, series: Series) -> str | None:
    """Why a clean run's series can't be what trials are compared with; None where they can."""
    seen = ", ".join(series.seen)
    told = f"seen: {seen}" if seen else "it told nothing"
    if metrics.format == "stdout" and not seen:
        told = "no line that it printed matches metrics.pattern"
    if series.problems:
        return series.problems[0]
    if not series.evals:
        return f"it told of no {metrics.metric!r} ({told}); metrics.metric, or campaign.metric, names another"
    if metrics.format != "stdout" and metrics.step not in series.seen:
        return f"it told of no {metrics.step!r} ({told}); metrics.step names another"
    if metrics.loss != "loss" and metrics.loss not in series.seen:
        return f"it told of no {metrics.loss!r} ({told})"
    if series.back is not None:
        return "its steps go back from {} to {}; metrics.step is to name a count that only grows".format(*series.back)
    for what, value in (("loss", series.loss), (metrics.metric, series.metric)):
        if value is not None and not math.isfinite(value):
            return f"its last {what} is {value}"
    return None


def blind_spot(metrics: Metrics, text: str) -> str | None:
    """A loss that a struck run may print and that the patterns would miss or cut short; None where there is none.

    text: what a clean run printed, whose first line with a loss is tried with other numbers in its place.
    """
    for line in _printed(text):
        for pattern in metrics.patterns:
            match = re.search(pattern, line)
            if match is None or match.groupdict().get(metrics.loss) is None:
                continue
            start, end = match.span(metrics.loss)
            for odd in _ODD:
                changed = re.search(pattern, f"{line[:start]}{odd}{line[end:]}")
                if changed is None or changed[metrics.loss] != odd:
                    return (
                        f"metrics.pattern does not read a loss of {odd} in a line like {line.strip()[:80]!r}, so a run "
                        f"that breaks down would be overlooked; let the group be (?P<{metrics.loss}>{NUMBER})"
                    )
            return None
    return None


def aligned(series: Series, golden: Mapping[int, float], ended_well: bool) -> dict[int, tuple[float, float]]:
    """A run's evaluations, as they are compared with its golden run's. golden: step -> metric.

    Where it has a line for a step, but no value where the golden run has one, that is NaN: writers leave NaN out. A run
    that came to its end sooner, such as one that stops early, keeps its last value to the golden run's last step.
    """
    evals = dict(series.evals)
    for step in golden.keys() & series.lines - evals.keys():
        evals[step] = (math.nan, math.nan)
    if ended_well and evals and golden and max(evals) < max(golden):
        evals[max(golden)] = evals[max(evals)]
    return dict(sorted(evals.items()))
