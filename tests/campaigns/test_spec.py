"""A campaign file is checked key by key, and --set changes any of it."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flipper.campaigns import deaths
from flipper.campaigns import spec as spec_module
from flipper.campaigns.cells import cells_of
from flipper.campaigns.spec import Spec, read_spec, spec_of
from flipper.errors import UsageError

WHOLE = """
[campaign]
name = "small"
seed = 7
training_seeds = [1, 2]
recipe = "digits-mlp"
inject_epoch = 1
epochs = 2
trials = 5
[axes]
parallel = ["ddp:2", "pipeline:2"]
bits = ["sign", "exponent"]
count = 1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "campaign.toml"
    path.write_text(text, "utf-8")
    return path


def test_what_the_file_says_is_what_the_spec_holds(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, WHOLE))
    assert (spec.name, spec.seed, spec.training_seeds, spec.trials) == ("small", 7, (1, 2), 5)
    assert spec.slices[0].axes == {"parallel": ("ddp:2", "pipeline:2"), "bits": ("sign", "exponent"), "count": (1,)}


def test_a_record_gives_the_same_spec_again(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, WHOLE))
    assert Spec.from_record(json.loads(json.dumps(spec.record()))) == spec


@pytest.mark.parametrize(
    ("change", "axis", "values"),
    [
        ("axes.count=1,10,100", "count", (1, 10, 100)),
        ("axes.count=5", "count", (5,)),
        ("axes.bits=mantissa", "bits", ("mantissa",)),
        ("axes.bits=mantissa,sign", "bits", ("mantissa", "sign")),
        ("axes.bits=30", "bits", ("30",)),
        ("axes.bits=29,30,sign", "bits", ("29", "30", "sign")),
        ("axes.bits=[23]", "bits", ("23",)),
        ('axes.layer=["conv1"]', "layer", ("conv1",)),
        ("axes.ber=1e-6,1e-5", "ber", (1e-6, 1e-5)),
    ],
)
def test_set_replaces_an_axis(tmp_path: Path, change: str, axis: str, values: tuple[object, ...]) -> None:
    assert read_spec(written(tmp_path, WHOLE), [change]).slices[0].axes[axis] == values


def test_set_without_a_table_is_a_key_of_campaign(tmp_path: Path) -> None:
    assert read_spec(written(tmp_path, WHOLE), ["trials=9", "campaign.seed=3"]).seed == 3


@pytest.mark.parametrize(
    ("change", "key", "values"),
    [
        ("training_seeds=4", "training_seeds", (4,)),
        ("training_seeds=4,5", "training_seeds", (4, 5)),
        ("detect=loss-spike", "detect", ("loss-spike",)),
    ],
)
def test_set_takes_a_single_value_where_a_list_belongs(
    tmp_path: Path, change: str, key: str, values: tuple[object, ...]
) -> None:
    assert getattr(read_spec(written(tmp_path, WHOLE), [change]), key) == values


def test_one_training_seed_goes_with_commands_that_take_none(tmp_path: Path) -> None:
    (tmp_path / "a.pt").touch()
    text = (
        '[campaign]\nname = "own"\ntraining_seeds = 3\n[axes]\ncheckpoint = "a.pt"\n'
        '[commands]\nhere = "sh train {checkpoint} {metrics}"\n'
    )
    assert read_spec(written(tmp_path, text)).training_seeds == (3,)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("trails = 5", "no key of [campaign] 'trails'; did you mean trials?"),
        ("seed = 1.5", "campaign.seed must be a whole number, not 1.5"),
        ("seed = true", "campaign.seed must be a whole number, not True"),
        ("seed = -1", "campaign.seed must be 0 to 2**64 - 1, not -1"),
        ("training_seeds = []", "campaign.training_seeds must be whole numbers"),
        ("training_seeds = true", "campaign.training_seeds must be a whole number, or a list of them, not True"),
        ('recipe = "digits-mpl"', "no recipe named 'digits-mpl'; known: cifar10-alexnet,"),
        ("training_seeds = [1, 1]", "campaign.training_seeds: [1, 1] has one twice"),
        ('trials = "some"', "campaign.trials must be a positive whole number or \"all\", not 'some'"),
        ("trials = 0", 'campaign.trials must be a positive whole number or "all", not 0'),
        ("margin = 0.05\ntrials = 3", "give campaign.trials or campaign.margin, not both"),
        ("margin = 0.7", "campaign.margin must be a number between 0 and 0.5, not 0.7"),
        ('tolerance = "wide"', "campaign.tolerance must be \"auto\", or a number in the metric, not 'wide'"),
        ("tolerance = -0.1", 'campaign.tolerance must be "auto", or a number in the metric, not -0.1'),
        ("threads = 4", "campaign.threads must be 1, not 4"),
        ("inject_step = 3", "give campaign.inject_epoch or campaign.inject_step"),
        ("steps = 3", "give campaign.epochs or campaign.steps, not both"),
        ("inject_epoch = 2", "nothing would be trained"),
        ('name = "a/b"', "campaign.name is 'a/b'"),
        ('name = " "', "campaign.name is ' '; it names a folder"),
        ('name = "a\\u0000b"', r"campaign.name is 'a\x00b'; no text may hold the character NUL"),
        ('training_seeds = [1, "\\u0000"]', r"campaign.training_seeds is '\x00'; no text may hold the character NUL"),
        ("name = 2020-01-01", "campaign.name is 2020-01-01, a date; it must be a text, which stands in quotes, a "),
        ('better = "more"', 'campaign.better must be "higher" or "lower", not \'more\''),
        ("extreme_factor = nan", "campaign.extreme_factor must be a number above 1, not nan"),
        ("tolerance = inf", 'campaign.tolerance must be "auto", or a number in the metric, not inf'),
        ("timeout = 1e9", "campaign.timeout must be at most 1e+06 seconds, not 1e+09"),
        ('contrast = ["ddp:2"]', "one model-parallel; or two recoveries, not ['ddp:2']"),
        ('contrast = ["ddp:2", "ddp:2"]', "or two recoveries, not ['ddp:2', 'ddp:2']"),
        ('contrast = ["ddp:2", "ddp:3", "ddp:4"]', "or two recoveries, not ['ddp:2', 'ddp:3', 'ddp:4']"),
        ("contrast = [1, 2]", "or two recoveries, not [1, 2]"),
        ('detect = ["replicas", "ghosts"]', "campaign.detect: there is no 'ghosts', but nonfinite-loss,"),
        ('checkpoint_format = "zip"', "campaign.checkpoint_format: there is no 'zip', but safetensors, "),
        ('device = "tpu"', "campaign.device: there is no 'tpu', but auto, cpu, cuda"),
        ('metric = "f1"', "campaign.metric must be accuracy or loss with a recipe, not 'f1'"),
    ],
)
def test_a_wrong_key_is_told_with_what_was_seen_and_what_is_allowed(tmp_path: Path, line: str, told: str) -> None:
    keys = {part.split(" = ")[0] for part in line.splitlines()} | ({"trials"} if "margin" in line else set())
    kept = [each for each in WHOLE.splitlines() if each.split(" = ")[0] not in keys]
    text = "\n".join(kept).replace("[campaign]", f"[campaign]\n{line}")
    with pytest.raises(UsageError) as error:
        read_spec(written(tmp_path, text))
    assert told in str(error.value)
    assert str(tmp_path / "campaign.toml") in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[axes]", "[axis]", "no table 'axis'"),
        ("count = 1", "counts = 1", "no axis of axes 'counts'; did you mean count?"),
        ("count = 1", "count = 2020-01-01", "axes.count is 2020-01-01, a date; it must be a text, which stands in "),
        ("count = 1", "count = [1, 07:32:00]", "axes.count is 07:32:00, a time; it must be a text"),
        ("count = 1", "weight = {a = 1979-05-27T07:32:00Z}", "axes.weight.a is 1979-05-27 07:32:00+00:00, a datetime;"),
        ("[axes]", "[slurm]\ntime = 07:32:00\n[axes]", "slurm.time is 07:32:00, a time; it must be a text"),
        ("[axes]", '[commands]\na = "x\\u0000"\n[axes]', r"commands.a is 'x\x00'; no text may hold the character NUL"),
        ("[axes]", '[commands]\n"a\\u0000" = "x"\n[axes]', r"commands has the key 'a\x00'; no text may hold the cha"),
        ("count = 1", f"{'.'.join(['count'] * 5000)} = 1", ".count: lists and tables nest deeper than 20; no key"),
        ("count = 1", f"count = {'[' * 50}{']' * 50}", "axes.count: lists and tables nest deeper than 20; no key"),
        ("count = 1", "count = []", "axes: count has no value"),
        ("count = 1", "count = [1, 1]", "axes: count has 1 twice"),
        ("count = 1", "count = [[1, 2]]", "axes: count takes no list"),
        ('recipe = "digits-mlp"', "", "give campaign.recipe, or a table [commands]"),
        ('parallel = ["ddp:2", "pipeline:2"]', "", "an axis parallel is missing"),
        ("[axes]", "[[slices]]\ntrials = 0", "slices 1: trials must be a positive whole number"),
        ("[campaign]", "[campaign", "no TOML"),
        ("count = 1", f"count = {'[' * 5000}{']' * 5000}", "no TOML: its lists or tables nest too deep"),
    ],
)
def test_a_wrong_table_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        read_spec(written(tmp_path, WHOLE.replace(old, new, 1)))
    assert told in str(error.value)


VALUES = (
    True, 0, -1, 1, 10**30, 10**400, -0.5, 1.5, 5e-324, 1e308, float("nan"), float("inf"), "", "a", "é\0", "x" * 5000,
    "all", "ddp:2", "rank-loss", "2h", "../x", [], [[]], [1, 1], ["a", 1], [float("nan")], {}, {"a": 1},
    {"a": float("nan")}, {"a": []}, {"*": 10**400}, [{"a": 1}],
)  # fmt: skip
FLIPS = {"name": "x", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2}
DEATHS = {"name": "x", "recipe": "digits-mlp", "fault": "rank-loss", "save_every": 3, "epochs": 2}


@pytest.mark.parametrize(
    ("campaign", "axes", "every"),
    [
        (FLIPS, {"parallel": "ddp:2", "role": "parameter"}, spec_module.AXES),
        (DEATHS, {"parallel": "ddp:4", "recovery": "restart"}, deaths.AXES),
    ],
    ids=["flips", "deaths"],
)
def test_any_value_of_any_key_is_taken_and_kept_or_told_in_one_line(
    campaign: dict[str, Any], axes: dict[str, Any], every: tuple[str, ...]
) -> None:
    told: list[str] = []
    keys = [("campaign", key) for key in spec_module.KINDS] + [("axes", axis) for axis in (*every, "fault")]
    for (table, key), value in itertools.product(keys, VALUES):
        document = copy.deepcopy({"campaign": campaign, "axes": axes})
        document[table][key] = copy.deepcopy(value)
        try:
            spec = spec_of(document)
            cells = cells_of(spec)
        except UsageError as error:
            told.append(str(error))
        else:
            assert Spec.from_record(json.loads(json.dumps(spec.record(), allow_nan=False))) == spec
            assert len(cells) == 1
    assert len(told) > len(keys) * len(VALUES) / 2
    assert not [each for each in told if "\n" in each]


@pytest.mark.parametrize("change", ["count", "=3", "axes.=3", "slices.count=3"])
def test_a_set_that_is_no_key_and_value_is_refused(tmp_path: Path, change: str) -> None:
    text = WHOLE + "[[slices]]\nrole = \"parameter\"\n"
    with pytest.raises(UsageError, match="--set"):
        read_spec(written(tmp_path, text), [change])


@pytest.mark.parametrize("change", ["axes.count=2020-01-01", "axes.bits=sign,2020-01-01", "seed=07:32:00"])
def test_a_set_to_a_date_or_time_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(UsageError, match=r"; it must be a text, which stands in quotes, a number, true, false, or a "):
        read_spec(written(tmp_path, WHOLE), [change])


def test_slices_take_what_axes_gives_to_all_and_replace_it(tmp_path: Path) -> None:
    text = WHOLE + '[[slices]]\nrole = "parameter"\n[[slices]]\nparallel = "ddp:2"\nreach = "one"\ntrials = 2\n'
    first, second = read_spec(written(tmp_path, text)).slices
    assert first.axes["parallel"] == ("ddp:2", "pipeline:2")
    assert first.axes["role"] == ("parameter",)
    assert first.trials is None
    assert second.axes["parallel"] == ("ddp:2",)
    assert second.axes["reach"] == ("one",)
    assert second.trials == 2
