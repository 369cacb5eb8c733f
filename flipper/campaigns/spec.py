"""Spec: what a campaign is asked to do, read from a TOML file and checked key by key."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from flipper import toml
from flipper.campaigns import deaths, fault_kinds
from flipper.campaigns.command_lines import OF_A_RECIPE, check_commands, checkpoints_of
from flipper.campaigns.metrics_files import metrics_of
from flipper.errors import FlipperError, UsageError, shortened
from flipper.text_files import read_named

AMOUNTS: Final = ("count", "ber", "fraction", "fit", "hours")
"""Axes that say how many faults a trial has; they are no part of its seed, so that doses nest."""

DRAWING: Final = (
    "layer", "exclude", "role", "dtype", "bits", "spread", "weight", "field_weight", "effect", "burst", "finite",
    "max_abs", "direction",
)  # fmt: skip
"""Axes that say which faults are drawn, by the names of INTERFACE sections 2 and 3."""

AXES: Final = ("parallel", *DRAWING, *AMOUNTS, "reach", "checkpoint")

_LISTS: Final = ("layer", "exclude", "role", "dtype")
"""Axes whose single values may be lists themselves: several layers that are struck together."""

KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "name": ((str,), "a text"),
    "fault": ((str,), " or ".join(map(repr, fault_kinds.FAULTS))),
    "seed": ((int,), "a whole number"),
    "training_seeds": ((list, int), "a whole number, or a list of them"),
    "recipe": ((str,), "a recipe's name, or FILE.py:NAME"),
    "data_dir": ((str,), "a folder"),
    "inject_epoch": ((int,), "a whole number"),
    "inject_step": ((int,), "a whole number"),
    "epochs": ((int,), "a whole number"),
    "steps": ((int,), "a whole number"),
    "trials": ((int, str), 'a whole number, or "all"'),
    "margin": ((float,), "a number between 0 and 0.5"),
    "confidence": ((float,), "a number between 0.5 and 1"),
    "null_trials": ((int,), "a whole number"),
    "tolerance": ((int, float, str), '"auto", or a number in the metric'),
    "equivalence": ((float,), "a number between 0 and 1"),
    "extreme_factor": ((int, float), "a number above 1"),
    "save_every": ((int,), "a whole number of steps"),
    "evaluate_every": ((int,), "a whole number of steps"),
    "probe_every": ((int,), "a whole number of steps"),
    "detect": ((list, str), "a detector, or a list of them"),
    "contrast": ((list,), "two layouts, one data-parallel, one model-parallel; or two recoveries"),
    "checkpoint_format": ((str,), "safetensors, pytorch, hdf5 or dcp"),
    "device": ((str,), "auto, cpu or cuda"),
    "timeout": ((int, float), "seconds"),
    "threads": ((int,), "1"),
    "metric": ((str,), "the name of what is compared"),
    "better": ((str,), '"higher" or "lower"'),
    "fit": ((int, float), "FIT per Mbit, of a machine's memory"),
}
"""Keys of [campaign], the types that each takes, and how that is said."""

_SEVERAL: Final = frozenset(("training_seeds", "detect"))
"""Keys of [campaign] whose lists may be written as a single value."""

DEEPEST: Final = 20
"""How deep lists and tables may nest; more than any key takes, and less than what reads and writes them can do."""

Value = Any
Axes = dict[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Slice:
    """A part of a campaign: axes that are crossed, and trials per cell where they differ from the campaign's."""

    axes: Axes
    trials: int | None = None


@dataclass(frozen=True)
class Spec:
    """A campaign. Exactly one of `recipe` and `commands` is given; the rest are the keys of INTERFACE section 8.

    fault: "bit-flip", or "rank-loss": ranks die; the axes are then those of `deaths`. save_every: steps between the
    checkpoints that a restart goes on from.
    trials: per cell, when there is no margin and no census. census: every eligible bit once. margin, confidence:
    trials of a cell go on until its interval is no wider. tolerance: None takes the band from the null trials.
    equivalence: differences smaller than that are none. extreme_factor: of golden's largest |parameter|. contrast: the
    data- and the model-parallel layout of the primary question, or two recoveries. fit: upsets of memory per 1e9 hours
    and Mbit.
    slurm: what a batch system's jobs ask for; see engines.slurm.
    here: the folder of the campaign file, which what [commands] and checkpoints name is relative to. inject_step and
    inject_epoch say with commands when the checkpoints were saved, timeout how long a whole run may take.
    """

    name: str
    slices: tuple[Slice, ...]
    fault: str = fault_kinds.BIT_FLIP
    seed: int = 0
    training_seeds: tuple[int, ...] = (1,)
    recipe: str | None = None
    data_dir: str | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    inject_epoch: int | None = None
    inject_step: int | None = None
    epochs: int | None = None
    steps: int | None = None
    trials: int = 20
    census: bool = False
    margin: float | None = None
    confidence: float = 0.95
    null_trials: int = 20
    tolerance: float | None = None
    equivalence: float = 0.05
    extreme_factor: float = 10.0
    save_every: int = 0
    evaluate_every: int = 0
    probe_every: int = 0
    detect: tuple[str, ...] = ()
    contrast: tuple[str, str] | None = None
    checkpoint_format: str = "safetensors"
    device: str = "cpu"
    timeout: float = 300.0
    threads: int = 1
    metric: str = "accuracy"
    better: str = "higher"
    fit: float | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)
    here: str = ""

    def record(self) -> dict[str, Any]:
        """Every key with its value, ready for JSON; `from_record` reads it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["slices"] = [{"axes": dict(part.axes), "trials": part.trials} for part in self.slices]
        return values

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Spec:
        """What `record` gave; raises UsageError for anything else. What it names may be elsewhere by now.

        Without the checks of `check_recipe`, whose imports take longer than all else.
        """
        record = json.loads(json.dumps(record))
        here = record.get("here")
        spec = spec_of(_tables(record), Path(here) if isinstance(here, str) else None, kept=True)
        for key, value in json.loads(json.dumps(spec.record())).items():
            if key in record and record[key] != value:
                raise UsageError(f"{key} is {record[key]!r}, which `campaign run` does not write there")
        return spec


def read_spec(path: Path, changes: Sequence[str] = ()) -> Spec:
    """Read and check a campaign file. changes: texts of the form KEY=VALUE that replace or add to what it says.

    Raises UsageError naming the file, the key, what was seen and what is allowed.
    """
    text = read_named(path)
    try:
        document = toml.parse(text)
        for change in changes:
            _apply(document, change)
        return spec_of(document, path.absolute().parent)
    except FlipperError as error:
        raise UsageError(f"{path}: {error}") from error


def spec_of(document: Mapping[str, Any], here: Path | None = None, kept: bool = False) -> Spec:
    """The campaign that the tables of a campaign file ask for; here: the folder of the file. Raises UsageError.

    kept: they are of a campaign that was run before, and what they name need not be there any more.
    """
    here = here or Path.cwd()
    _check_plain(document)
    _known("table", document, ("campaign", "axes", "slices", "commands", "metrics", "slurm"))
    campaign = _table(document, "campaign")
    _known("key of [campaign]", campaign, KINDS)
    for key, value in campaign.items():
        kinds, allowed = KINDS[key]
        if not _is_kind(value, kinds):
            raise UsageError(f"campaign.{key} must be {allowed}, not {value!r}")
    # --set gives a list only where there are commas: a single value is a list of one.
    for key in _SEVERAL.intersection(campaign):
        campaign[key] = campaign[key] if isinstance(campaign[key], list) else [campaign[key]]
    values: dict[str, Any] = dict(campaign)
    values["training_seeds"] = _seeds(values.get("training_seeds", [1]))
    values.update(_amount(values.pop("trials", None), values.get("margin")))
    if isinstance(tolerance := values.get("tolerance"), str):
        if tolerance != "auto":
            raise UsageError(f"campaign.tolerance must be {KINDS['tolerance'][1]}, not {tolerance!r}")
        del values["tolerance"]
    for key in ("detect", "contrast"):
        if key in values:
            values[key] = tuple(values[key])
            if not all(isinstance(each, str) for each in values[key]):
                raise UsageError(f"campaign.{key} must be {KINDS[key][1]}, not {campaign[key]!r}")
    commands, metrics = _table(document, "commands", needed=False), _table(document, "metrics", needed=False)
    if wrong := next((key for key, value in commands.items() if not isinstance(value, str)), None):
        raise UsageError(f"commands.{wrong} must be a command line, not {commands[wrong]!r}")
    if bool(commands) == ("recipe" in values):
        raise UsageError("give campaign.recipe, or a table [commands] with a line for each layout; one of them")
    values["fault"] = fault_kinds.fault_of(document)
    values["slices"] = _slices(document, commands, None if kept else here, values["fault"])
    if "name" not in values:
        raise UsageError("campaign.name is missing: a text, which names the folder of the results too")
    metric = values.setdefault("metric", metrics.get("metric", "accuracy"))
    if isinstance(metric, str) and metric.endswith("loss"):
        values.setdefault("better", "lower")
    if commands:
        check_commands(campaign, commands, AXES, metrics_of(metrics, metric).in_file)
        values["here"] = str(here)
    elif metrics:
        raise UsageError("a table [metrics] goes with [commands]; a recipe's are known")
    spec = Spec(commands=commands, metrics=metrics, slurm=_table(document, "slurm", needed=False), **values)
    _check(spec)
    if not kept:
        check_recipe(spec)
    return spec


def _tables(record: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a campaign file that asks for what a record holds."""
    usual = {each.name: each.default for each in fields(Spec)}
    campaign = {key: value for key, value in record.items() if key in KINDS and value is not None}
    if record.get("commands"):
        for key in OF_A_RECIPE:
            if campaign.get(key) in ([], usual[key]):
                campaign.pop(key, None)
    if record.get("census") is True:
        campaign["trials"] = "all"
    elif "margin" in campaign:
        campaign.pop("trials", None)
    tables = {name: record[name] for name in ("commands", "metrics", "slurm") if record.get(name)}
    return {**tables, "campaign": campaign, "slices": _parts(record.get("slices"))}


def _parts(slices: Any) -> list[dict[str, Any]]:
    """The tables of the slices of a record."""
    if not isinstance(slices, list) or not all(isinstance(p, dict) and isinstance(p.get("axes"), dict) for p in slices):
        raise UsageError(f"slices must be a list of tables, each with its axes and trials, not {slices!r}")
    return [
        {**part["axes"], **({} if part.get("trials") is None else {"trials": part["trials"]})} for part in slices
    ]


def _check_plain(value: Any, where: str = "", depth: int = 0) -> None:
    """Whether JSON has a word for a value, and a command line a place; raises UsageError naming its key."""
    if depth > DEEPEST:
        raise UsageError(f"{shortened(where)}: lists and tables nest deeper than {DEEPEST}; no key takes that")
    if isinstance(value, Mapping):
        for key, each in value.items():
            _check_text(key, f"{where or 'the file'} has the key")
            _check_plain(each, f"{where}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_plain(each, where, depth + 1)
    elif isinstance(value, str):
        _check_text(value, f"{where} is")
    elif not isinstance(value, int | float):
        raise UsageError(
            f"{where} is {value}, a {type(value).__name__}; it must be a text, which stands in quotes, a number, true, "
            "false, or a list or table of these"
        )


def _check_text(text: str, which: str) -> None:
    if "\0" in text:
        raise UsageError(f"{which} {text!r}; no text may hold the character NUL: command lines and file names can't")


def _is_kind(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return False
    if float in kinds and isinstance(value, int | float):
        return abs(value) <= sys.float_info.max  # nor is NaN
    return isinstance(value, kinds)


def _apply(document: dict[str, Any], change: str) -> None:
    """Put one KEY=VALUE of --set into the tables; the value is TOML, or a text, or several of both at commas."""
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {change!r} is not of the form KEY=VALUE, such as axes.count=1,10,100")
    if len(keys) == 1:
        keys.insert(0, "campaign")
    table: Any = document
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if isinstance(table, list):
            raise UsageError(f"--set {change!r}: {key} is a list of tables; set a key of campaign, axes or commands")
        if not isinstance(table, dict):
            raise UsageError(f"--set {change!r}: {key} is no table")
    table[keys[-1]] = text.strip() if keys[0] in ("commands", "metrics") else _value(text.strip())


def _value(text: str) -> Value:
    for attempt in (text, f"[{text}]") if "," in text else (text,):
        try:
            return toml.parse(f"value = {attempt}")["value"]
        except UsageError:
            continue
    return [_value(part.strip()) for part in text.split(",")] if "," in text else text


def _table(document: Mapping[str, Any], name: str, needed: bool = True) -> dict[str, Any]:
    if name not in document:
        if needed:
            raise UsageError(f"the table [{name}] is missing")
        return {}
    if not isinstance(document[name], dict):
        raise UsageError(f"{name} must be a table, not {document[name]!r}")
    return dict(document[name])


def _known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    allowed = sorted(known)
    for key in given:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(allowed)}"
            raise UsageError(f"no {what} {key!r}; {hint}")


def _seeds(given: Sequence[Any]) -> tuple[int, ...]:
    wrong = [each for each in given if type(each) is not int or not 0 <= each < 2**64]
    if wrong or not given:
        raise UsageError(f"campaign.training_seeds must be whole numbers from 0 to 2**64 - 1, not {wrong or given}")
    if len(set(given)) < len(given):
        raise UsageError(f"campaign.training_seeds: {list(given)} has one twice")
    return tuple(given)


def _amount(trials: Any, margin: float | None) -> dict[str, Any]:
    """How many trials: a number, all, or a margin."""
    if trials is not None and margin is not None:
        raise UsageError("give campaign.trials or campaign.margin, not both: a margin says when a cell has enough")
    if trials == "all":
        return {"census": True}
    if isinstance(trials, str) or (trials is not None and trials < 1):
        raise UsageError(f'campaign.trials must be a positive whole number or "all", not {trials!r}')
    return {} if trials is None else {"trials": trials}


def _slices(
    document: Mapping[str, Any], commands: Mapping[str, str], here: Path | None, fault: str
) -> tuple[Slice, ...]:
    """The slices, each with what [axes] gives to all; [axes] alone is the only one. here: None looks for no files."""
    axes = deaths.AXES if fault == fault_kinds.RANK_LOSS else AXES
    shared = _table(document, "axes", needed=False)
    parts = document.get("slices", [{}])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts) or not parts:
        raise UsageError("slices must be tables, each begun by [[slices]]")
    found = []
    for number, part in enumerate(parts, 1):
        where = "axes" if "slices" not in document else f"slices {number}"
        trials = part.get("trials")
        if trials is not None and (type(trials) is not int or trials < 1):
            raise UsageError(f"{where}: trials must be a positive whole number, not {trials!r}")
        given = {**shared, **{key: value for key, value in part.items() if key != "trials"}}
        given.pop("fault", None)
        if commands:
            given.setdefault("parallel", list(commands))
            if "checkpoint" in given:
                given["checkpoint"] = checkpoints_of(where, given["checkpoint"], here)
        fault_kinds.check_axes(where, given, fault, AXES, deaths.AXES)
        _known(f"axis of {where}", given, axes)
        if "parallel" not in given:
            raise UsageError(f'{where}: an axis parallel is missing, such as parallel = ["ddp:2", "pipeline:2"]')
        found.append(Slice({axis: _values(where, axis, given[axis]) for axis in axes if axis in given}, trials))
    return tuple(found)


def _values(where: str, axis: str, given: Any) -> tuple[Value, ...]:
    values = tuple(given) if isinstance(given, list) else (given,)
    if axis == "bits":  # a position, which --set makes a number of
        values = tuple(str(value) if type(value) is int else value for value in values)
    if not values:
        raise UsageError(f"{where}: {axis} has no value")
    for value in values:
        deaths.check_value(where, axis, value)
        if isinstance(value, list) and (axis not in _LISTS or not all(isinstance(each, str) for each in value)):
            raise UsageError(f"{where}: {axis} takes no list {value!r} as one of its values")
        if isinstance(value, dict) and axis not in ("weight", "field_weight"):
            raise UsageError(f"{where}: {axis} takes no table {value!r}")
    if repeated := next((value for index, value in enumerate(values) if value in values[:index]), None):
        raise UsageError(f"{where}: {axis} has {repeated!r} twice")
    return values


def _check(spec: Spec) -> None:
    """What is wrong with values that have the right types, or with several together."""
    if not spec.name.strip() or "/" in spec.name or spec.name.startswith(".") or not spec.name.isprintable():
        raise UsageError(f"campaign.name is {spec.name!r}; it names a folder: text without /, and no leading dot")
    if not 0 <= spec.seed < 2**64:
        raise UsageError(f"campaign.seed must be 0 to 2**64 - 1, not {spec.seed}")
    for key, low, high in (("margin", 0, 0.5), ("confidence", 0.5, 1), ("equivalence", 0, 1)):
        value = getattr(spec, key)
        if value is not None and not low < value < high:
            raise UsageError(f"campaign.{key} must be {KINDS[key][1]}, not {value}")
    for key in ("null_trials", "save_every", "evaluate_every", "probe_every", "inject_epoch", "inject_step", "epochs",
                "steps"):  # fmt: skip
        if (getattr(spec, key) or 0) < 0:
            raise UsageError(f"campaign.{key} is negative: {getattr(spec, key)}")
    if spec.tolerance is not None and spec.tolerance < 0:
        raise UsageError(f'campaign.tolerance must be {KINDS["tolerance"][1]}, not {spec.tolerance!r}')
    if spec.contrast is not None and not len(set(spec.contrast)) == len(spec.contrast) == 2:
        raise UsageError(f"campaign.contrast must be {KINDS['contrast'][1]}, not {list(spec.contrast)}")
    if spec.extreme_factor <= 1:
        raise UsageError(f"campaign.extreme_factor must be {KINDS['extreme_factor'][1]}, not {spec.extreme_factor}")
    if spec.better not in ("higher", "lower"):
        raise UsageError(f"campaign.better must be {KINDS['better'][1]}, not {spec.better!r}")
    if spec.threads != 1 and spec.recipe:
        raise UsageError(f"campaign.threads must be 1, not {spec.threads}: sums change with the number of threads")
    if spec.timeout <= 0:
        raise UsageError(f"campaign.timeout must be a positive number of seconds, not {spec.timeout}")
    fault_kinds.check_keys(spec)


def check_recipe(spec: Spec) -> None:
    """Raise UsageError for what a recipe can't be told; a campaign of commands has none."""
    if not spec.recipe:
        return
    from flipper.training.recipes import check_name, user
    from flipper.training.spec import DETECTORS, DEVICES, LONGEST_TIMEOUT, SUFFIXES

    if not user.is_meant(spec.recipe):  # a user's file may be elsewhere where results are only read
        check_name(spec.recipe)
    if spec.fault == fault_kinds.BIT_FLIP and (spec.inject_epoch is None) == (spec.inject_step is None):
        raise UsageError("give campaign.inject_epoch or campaign.inject_step: after which the state is altered")
    if spec.epochs is not None and spec.steps is not None:
        raise UsageError("give campaign.epochs or campaign.steps, not both: where every run ends")
    if spec.epochs is None and spec.steps is None:
        raise UsageError("campaign.epochs (or campaign.steps) is missing: where every run ends")
    for at, end in ((spec.inject_epoch, spec.epochs), (spec.inject_step, spec.steps)):
        if at is not None and end is not None and at >= end:
            raise UsageError(f"the state is altered after {at}, and every run ends at {end}: nothing would be trained")
    formats = (spec.checkpoint_format,)
    for key, given, known in (("detect", spec.detect, DETECTORS), ("device", (spec.device,), DEVICES),
                              ("checkpoint_format", formats, SUFFIXES)):  # fmt: skip
        if unknown := [each for each in given if each not in known]:
            raise UsageError(f"campaign.{key}: there is no {unknown[0]!r}, but {', '.join(known)}")
    if spec.timeout > LONGEST_TIMEOUT:
        raise UsageError(f"campaign.timeout must be at most {LONGEST_TIMEOUT:g} seconds, not {spec.timeout:g}")
    if spec.metric not in ("accuracy", "loss"):
        raise UsageError(f"campaign.metric must be accuracy or loss with a recipe, not {spec.metric!r}")
