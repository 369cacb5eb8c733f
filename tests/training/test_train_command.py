"""`flipper train` on the command line: one record on stdout, metrics as they come, errors of one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flipper.cli import main
from flipper.errors import OutputError
from flipper.training.metrics import MetricsFile
from flipper.training.recipes import BUILT_IN


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def strict(text: str) -> dict[str, object]:
    """Parsed as JSON proper: no bare NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    answer: dict[str, object] = json.loads(text, parse_constant=refuse)
    return answer


def test_a_run_prints_one_record_and_writes_metrics(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    arguments = (
        "digits-mlp",
        "--parallel",
        "pipeline:2",
        "--steps",
        3,
        "--seed",
        5,
        "--save",
        tmp_path / "run",
    )
    code, out, err = run(capsys, *arguments, "--checkpoint-format", "hdf5", "--metrics", metrics)
    assert (code, err) == (0, f"wrote {tmp_path}/run/step-000003.h5\n")
    record = strict(out)
    assert list(record) == [
        *("recipe", "layout", "seed", "first_step", "steps", "loss", "accuracy"),
        *("state_digest", "resume_digest", "seconds"),
        *("struck_step", "detected", "replicas_differ_step", "replicas_heal_step", "files"),
    ]
    assert record["files"] == [f"{tmp_path}/run/step-000003.h5"]
    events = [strict(line) for line in metrics.read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "step", "eval", "saved", "end"]
    assert set(events[1]) == {"event", "step", "epoch", "loss", "grad_norm", "lr", "samples_per_s"}
    assert set(events[4]) == {"event", "step", "epoch", "loss", "accuracy"}
    assert set(events[5]) == {"event", "step", "path"}
    assert set(events[6]) == {"event", "step", "state_digest", "resume_digest", "seconds"}
    assert events[6]["state_digest"] == record["state_digest"]


def test_the_same_seed_and_layout_give_the_same_digests(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("digits-cnn", "--parallel", "ddp:2", "--steps", 3, "-q", "--seed")
    first, again, other = (strict(run(capsys, *arguments, seed)[1]) for seed in (7, 7, 8))
    assert first["resume_digest"] == again["resume_digest"]
    assert first["state_digest"] != other["state_digest"]


def test_a_seed_that_is_drawn_is_said_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, "digits-mlp", "--steps", 1)
    assert err == f"seed {strict(out)['seed']}\n"


def test_a_control_that_holds_exits_0_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "digits-mlp", "--steps", 4, "--seed", 1, "--control", "-q")
    assert (code, err) == (0, "")
    record = strict(out)
    assert (record["identical"], record["first_difference"], record["stopped_at"]) == (True, None, 2)


def test_a_control_names_no_files_since_it_keeps_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    code, out, err = run(capsys, "digits-mlp", "--steps", 4, "--seed", 1, "--control", "--metrics", metrics)
    assert (code, err, strict(out)["files"]) == (0, "", [])
    events = [strict(line)["event"] for line in metrics.read_text().splitlines()]
    assert events == ["start", "step", "step", "step", "step", "eval", "end"]


def test_a_control_that_fails_exits_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the resumed run is given another seed than the stopped one had."""
    from dataclasses import replace

    from flipper.training import control
    from flipper.training.run import TrainResult, train
    from flipper.training.spec import TrainSpec

    def train_otherwise(spec: TrainSpec, *args: object, **options: object) -> TrainResult:
        return train(replace(spec, seed=99) if spec.resume else spec)

    monkeypatch.setattr(control, "train", train_otherwise)
    code, out, _ = run(capsys, "digits-mlp", "--steps", 4, "--seed", 1, "--control", "-q")
    assert code == 3
    assert str(strict(out)["first_difference"]).startswith("model.fc1.")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no-such"], 2, "no recipe named 'no-such'; known: "),
        ([], 2, "name a RECIPE"),
        (["digits-mlp", "--parallel", "ddp:x"], 2, "layout 'ddp:x'"),
        (["digits-mlp", "--steps", "1", "--epochs", "1"], 2, "--epochs or --steps, not both"),
        (["digits-mlp", "--resume", __file__], 4, "[foreign]"),
        (["digits-mlp", "--metrics", __file__], 1, "exists"),
        (["digits-mlp", "--save-every", "2"], 2, "--save-every needs --save"),
        (["digits-mlp", "--checkpoint-format", "onnx"], 2, "known: safetensors, pytorch, hdf5, dcp"),
        (["digits-mlp", "--steps", "1", "--timeout", "nan"], 2, "--timeout must be above 0 and at most 1e+06 seconds"),
        (["digits-mlp", "--steps", "1", "--reach", "one"], 2, "--reach says which copies --inject strikes: give both"),
        (["digits-mlp", "--steps", "1", "--metrics", "/dev/full"], 1, "/dev/full can't be written: No space left on"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    got, out, err = run(capsys, *arguments, "-q")
    line = err.splitlines()[-1]
    assert (got, out) == (code, "")
    assert line.startswith("flipper: error: ")
    assert message in line
    assert len(err.splitlines()) == 1


def test_list_names_the_recipes_and_the_command_does_without_torch() -> None:
    """Only the ranks import it."""
    code = (
        "import sys, flipper.cli\n"
        "try: flipper.cli.main(['train', '--list'])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == list(BUILT_IN)


def test_the_backends_own_sum_warns_where_resuming_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("digits-mlp", "--steps", 1, "--seed", 1, "--allreduce", "native", "--parallel")
    assert run(capsys, *arguments, "hooks:2")[2] == ""
    code, out, err = run(capsys, *arguments, "hooks:3")
    assert (code, strict(out)["steps"]) == (0, 1)
    assert err == (
        "warning: with --allreduce native on more than 2 ranks a resumed run is not exact: sums depend on buckets\n"
    )


def test_a_rank_number_alone_in_the_environment_is_not_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch systems and other launchers export some of torchrun's names; the record is printed all the same."""
    monkeypatch.setenv("RANK", "1")
    code, out, _ = run(capsys, "digits-mlp", "--steps", 1, "--seed", 1)
    assert code == 0
    assert strict(out)["steps"] == 1


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "x"}, "RANK in the environment is 'x', not a number as torchrun sets it; unset it"),
        ({"RANK": ""}, "RANK in the environment is '', not a number"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE in the environment is '-1', not a number"),
        ({"MASTER_PORT": "any"}, "MASTER_PORT in the environment is 'any', not a number"),
        ({"RANK": "5"}, "RANK in the environment is 5, of WORLD_SIZE 1 ranks; unset both"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK in the environment is 1, of LOCAL_WORLD_SIZE 1 ranks; unset both"),
    ],
)
def test_what_torchrun_would_not_set_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", **TORCHRUN, **values}.items():
        monkeypatch.setenv(name, value)
    code, out, err = run(capsys, "digits-mlp", "--steps", 1, "--seed", 1)
    assert (code, out) == (2, "")
    assert err.startswith(f"flipper: error: {message}")
    assert err.count("\n") == 1


def test_of_two_runs_that_write_to_one_file_of_metrics_the_later_is_refused(tmp_path: Path) -> None:
    """Both found no file when they began; pipes and devices are written to as they are."""
    first, second = MetricsFile(tmp_path / "m.jsonl"), MetricsFile(tmp_path / "m.jsonl")
    with first, second:
        first.write({"event": "start"})
        with pytest.raises(OutputError, match=r"m\.jsonl: File exists$"):
            second.write({"event": "start"})
    assert (tmp_path / "m.jsonl").read_text() == '{"event": "start"}\n'
    with MetricsFile(Path("/dev/null")) as nowhere:
        nowhere.write({"event": "start"})


@pytest.mark.parametrize("folder", ["file", "file/below", "closed", "closed/below"])
def test_a_folder_that_nothing_can_be_saved_to_is_refused_before_the_first_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "closed").mkdir(mode=0o500)
    if folder.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("the superuser may write everywhere")
    where = ["--save", tmp_path / folder, "--metrics", tmp_path / "m.jsonl", "--parallel", "ddp:2"]
    code, out, err = run(capsys, "digits-mlp", "--steps", 3, "--seed", 1, *where)
    first = tmp_path / folder.partition("/")[0]
    why = f"{first} is no folder" if folder.startswith("file") else f"{first} can't be written to"
    assert (code, out, err) == (1, "", f"flipper: error: can't save to {tmp_path / folder}: {why}\n")
    assert not (tmp_path / "m.jsonl").exists()


def test_quiet_keeps_back_the_warning_about_native_sums(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("digits-mlp", "--steps", 1, "--seed", 1, "--parallel", "ddp:3", "--allreduce", "native", "--quiet")
    assert run(capsys, *arguments)[2] == ""
