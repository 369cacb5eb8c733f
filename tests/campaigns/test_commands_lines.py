"""Command lines of a campaign file: places, words, names of files, and what is refused when the file is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from shell_training import document, project

from flipper.campaigns.cells import cells_of, start_of, starts
from flipper.campaigns.command_lines import checkpoints_of, missing_executable, places, settings, words
from flipper.campaigns.spec import Spec, read_spec, spec_of
from flipper.errors import UsageError

LINE = "run {checkpoint} {metrics}"


def asked(
    folder: Path,
    line: str = LINE,
    axes: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    **campaign: Any,
) -> Spec:
    return spec_of(document({"own": line}, axes or {}, metrics or {}, **campaign), project(folder))


def test_places_are_names_in_braces_and_other_braces_are_text() -> None:
    line = "a {checkpoint} {{seed}} ${{HOME}} {} { seed } {print $1} {'a': {bits}} {checkpoint}"
    assert places(line) == ("checkpoint", "bits")


def test_words_are_split_as_a_shell_does_and_values_never_are(tmp_path: Path) -> None:
    values = {"checkpoint": "/a b/c'd", "seed": "7"}
    line = """
        run "two words" --from={checkpoint} a\\ b 'x {seed} "y"' {{seed}} "${{HOME}}" * > $0   # no comment
    """
    assert words(line, values, tmp_path) == [
        "run", "two words", "--from=/a b/c'd", "a b", 'x 7 "y"', "{seed}", "${HOME}", "*", ">", "$0", "#", "no",
        "comment",
    ]  # fmt: skip


def test_files_of_the_campaign_files_folder_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "sub" / "data.csv").touch()
    line = "./run.sh train.py other.py sub ./sub sub/data.csv --data=sub/data.csv --x=sub /bin ../{tmp} -c train.pyc"
    here = str(tmp_path)
    assert words(line.replace("../{tmp}", f"../{tmp_path.name}/train.py"), {}, tmp_path) == [
        f"{here}/run.sh", f"{here}/train.py", "other.py", "sub", f"{here}/sub", f"{here}/sub/data.csv",
        f"--data={here}/sub/data.csv", "--x=sub", "/bin", f"{here}/train.py", "-c", "train.pyc",
    ]  # fmt: skip
    assert words("train.py {{x}}", {}, tmp_path) == ["train.py", "{x}"]  # an executable is looked for on the PATH


def test_a_missing_executable_is_told_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    assert missing_executable("sh", tmp_path) is None
    assert missing_executable("run.sh", tmp_path) == (
        f"there is no executable 'run.sh' on the PATH; of {tmp_path}, write ./run.sh"
    )
    assert missing_executable(f"{tmp_path}/run.sh", tmp_path) == f"{tmp_path}/run.sh is not executable (chmod +x)"
    (tmp_path / "run.sh").chmod(0o755)
    if os.getuid() == 0 or os.access(tmp_path / "run.sh", os.X_OK):
        assert missing_executable(f"{tmp_path}/run.sh", tmp_path) is None


def test_settings_are_the_axes_that_a_line_asks_for() -> None:
    axes = {"parallel": "own", "checkpoint": "a.pt", "bits": "sign", "count": 10, "ber": 1e-9, "layer": ["a", "b"],
            "finite": True, "weight": {"a": 1}}  # fmt: skip
    line = "{parallel} {checkpoint} {count} {layer} {finite} {weight} {ber} {seed}"
    assert settings(line, axes) == (
        ("count", "10"), ("layer", "a,b"), ("finite", "true"), ("weight", '{"a":1}'), ("ber", "1e-09"),
    )  # fmt: skip


def test_only_settings_that_a_line_asks_for_make_golden_runs_of_their_own(tmp_path: Path) -> None:
    axes = {"bits": ["sign", "exponent"], "count": [1, 10]}
    spec = asked(tmp_path, f"{LINE} {{count}}", axes)
    found = starts(spec, cells_of(spec))
    assert [start.settings for start in found] == [(("count", "1"),), (("count", "10"),)]
    spec = asked(tmp_path, LINE, axes)
    assert [start.settings for start in starts(spec, cells_of(spec))] == [()]
    assert start_of(spec, cells_of(spec)[0], 0).checkpoint == "weights.safetensors"


def test_checkpoints_are_listed_once_and_globs_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt", "c[1].pt", "a.pt.flipper.json", "d/e/f.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert checkpoints_of("axes", "*.pt", tmp_path) == ["a.pt", "b.pt", "c[1].pt"]
    assert checkpoints_of("axes", ["c[1].pt", "?.*", "**/*.pt"], tmp_path) == ["c[1].pt", "a.pt", "b.pt", "d/e/f.pt"]
    assert checkpoints_of("axes", [str(tmp_path / "a.pt"), "d"], tmp_path) == [str(tmp_path / "a.pt"), "d"]
    assert checkpoints_of("axes", str(tmp_path / "[ab].pt"), tmp_path) == [str(tmp_path / f"{x}.pt") for x in "ab"]
    for given in ("*.bin", ["a.pt", "gone.pt"]):
        with pytest.raises(UsageError, match=r"axes: checkpoint '(\*\.bin|gone\.pt)' is not there; it is relative to"):
            checkpoints_of("axes", given, tmp_path)


def test_paths_are_relative_to_the_campaign_file_and_not_to_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path / "project")
    (folder / "own.toml").write_text(
        'campaign.name = "own"\naxes.checkpoint = "*.safetensors"\n[commands]\nown = "run {checkpoint} {metrics}"\n'
    )
    monkeypatch.chdir(tmp_path)
    spec = read_spec(Path("project/own.toml"))
    assert spec.here == str(folder)
    assert spec.slices[0].axes["checkpoint"] == ("weights.safetensors",)
    changed = read_spec(Path("project/own.toml"), ["commands.own=other, {checkpoint} > {metrics}", "seed=4"])
    assert changed.commands == {"own": "other, {checkpoint} > {metrics}"}
    assert Spec.from_record(spec.record()) == spec


@pytest.mark.parametrize(
    "campaign",
    [
        {}, {"metric": "loss"}, {"metric": "loss", "better": "higher"}, {"trials": "all"}, {"training_seeds": [3]},
        {"tolerance": "auto", "threads": 2, "inject_step": 7, "fit": 3}, {"contrast": ["own", "other"]},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "metrics", [{}, {"metric": "f1", "format": "csv"}, {"format": "stdout", "pattern": ["(?P<b>.)"], "metric": "b"}]
)
def test_a_record_is_the_same_spec_where_the_checkpoints_are_gone(
    tmp_path: Path, campaign: dict[str, Any], metrics: dict[str, Any]
) -> None:
    spec = asked(tmp_path, axes={"layer": [["a", "b"], "c"]}, metrics=metrics, **campaign)
    (tmp_path / "weights.safetensors").unlink()
    assert Spec.from_record(spec.record()) == spec


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run {checkpoint} {metrics} {bitz}",
         "commands.own: no placeholder {bitz}; known: {checkpoint}, {metrics}, {output}, {workdir}, {seed}, "),
        ("sh -c 'echo ${HOME}' {checkpoint} {metrics}", "the text itself: {{HOME}}"),
        ("run {checkpoint} {metrics} {count}", "commands.own asks for {count}, an axis that is not given"),
        ("run {metrics}", "commands.own: {checkpoint} is missing: where the command gets the file to resume from"),
        ("run {checkpoint}", "commands.own: {metrics} is missing: where the command is to write them; or set "
                             'metrics.file to where it does, or metrics.format = "stdout"'),
        ("run '{checkpoint} {metrics}", "can't be split into words: no closing quotation"),
        ("", "commands.own: the command line is empty"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_filled_in_is_refused_when_it_is_read(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cells_of(asked(tmp_path, line))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 3}, "campaign.epochs goes with a recipe; with [commands] the command line itself says it"),
        ({"detect": []}, "campaign.detect goes with a recipe"),
        ({"training_seeds": [1, 2]}, "campaign.training_seeds has 2 seeds, and commands.own does not use {seed}"),
        ({"axes": {"reach": "one"}}, "reach = 'one' goes with a recipe; a command resumes from an altered file"),
        ({"axes": {"parallel": "ddp"}}, "no command 'ddp'; [commands] has own"),
        ({"axes": {"checkpoint": "gone.pt"}}, "axes: checkpoint 'gone.pt' is not there; it is relative to "),
        ({"axes": {"checkpoint": 3}}, "checkpoint must be a path or a glob, or a list of these, not 3"),
        ({"metrics": {"format": "xml"}}, "no metrics.format 'xml'; known: jsonl, csv, stdout"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_with_commands_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cells_of(asked(tmp_path, **values))
    assert message in str(caught.value)


def test_other_tables_that_contradict_are_refused(tmp_path: Path) -> None:
    tables = document({"own": LINE}, {}, {})
    del tables["axes"]["checkpoint"]
    with pytest.raises(UsageError, match="an axis checkpoint is missing: the file that the commands resume from"):
        cells_of(spec_of(tables, tmp_path))
    with pytest.raises(UsageError, match=r"commands\.a/b: a command's name is part of file names"):
        spec_of(document({"a/b": LINE}, {}, {}), project(tmp_path))
    recipe = {"campaign": {"name": "a", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2},
              "axes": {"parallel": "single"}, "metrics": {"format": "csv"}}  # fmt: skip
    with pytest.raises(UsageError, match=r"a table \[metrics\] goes with \[commands\]; a recipe's are known"):
        spec_of(recipe, tmp_path)


def test_a_metric_that_is_a_loss_is_better_when_lower_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert asked(tmp_path).better == "higher"
    assert asked(tmp_path, metrics={"metric": "val_loss"}).better == "lower"
    spec = asked(tmp_path, metrics={"metric": "val_loss"}, metric="score")
    assert (spec.metric, spec.better) == ("score", "higher")
    assert asked(tmp_path, metric="loss", better="higher").better == "higher"
