"""Campaigns over the user's own commands, run for real; most over train.sh, a framework of bash, od and awk."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell_training import LINE, alive, document, project, run, until, weights_file, weights_in

from flipper.campaigns.again import run_again
from flipper.campaigns.coordinator import Progress
from flipper.campaigns.engines import open_engine
from flipper.campaigns.folder import open_campaign, planned
from flipper.campaigns.results import Results, load_results, rows
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import spec_of
from flipper.campaigns.store import Store
from flipper.errors import CheckpointError, FlipperError, OutputError, TrainingError, UsageError

WHOLE = "./train.sh {checkpoint} {metrics} {output} jsonl stay"


def outcomes(folder: Path, *arguments: Any, **values: Any) -> list[str]:
    results, _ = run(folder, *arguments, **values)
    return [row["outcome"] for row in rows(results)]


def expected(values: list[float], seed: int = 0) -> tuple[list[float], list[float]]:
    """The loss and accuracy that train.sh tells after each step, reckoned once more."""
    losses, accuracies = [], []
    for step in range(1, 5):
        gaps = [(value - 1) / 2**step for value in values]
        gaps[0] += seed % 7 / 1000
        losses.append(sum(gap * gap for gap in gaps) / len(gaps))
        accuracies.append(sum(abs(gap) < 0.2 for gap in gaps) / len(gaps))
    return losses, accuracies


FORMATS = {
    "jsonl": {},
    "csv": {"format": "csv", "step": "iteration", "loss": "train", "metric": "acc"},
    "stdout": {
        "format": "stdout",
        "pattern": [r"^\[(?P<step>\d+)/4\] loss=(?P<loss>\S+)", r"accuracy after \d+: (?P<accuracy>\S+)%"],
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_framework_of_shell_and_awk_is_run_and_read_in_each_format(tmp_path: Path, name: str) -> None:
    folder = project(tmp_path)
    line = f"./train.sh {{checkpoint}} {{metrics}} {{output}} {name} stay"
    results, notes = run(folder, {"shell": line}, {"bits": "any"}, FORMATS[name], trials=4)
    losses, accuracies = expected(weights_in(folder / "weights.safetensors"))
    (golden,) = results.goldens.values()
    assert [(step, pytest.approx(loss, rel=1e-6)) for step, loss, _ in golden.steps] == list(enumerate(losses, 1))
    assert [(step, metric) for step, _, metric in golden.evals] == list(enumerate(accuracies, 1))
    assert (golden.first_step, golden.last_step, golden.max_abs_parameter, golden.nonfinite) == (0, 4, 1.0, 0)
    assert notes == []
    for row, each in zip(rows(results), results.trials, strict=True):
        ((tensor, flat, bits, before, after),) = each.run.faults
        assert tensor == "layer.weight"
        far = not abs(after) <= 100
        assert before == weights_in(folder / "weights.safetensors")[flat]
        assert row["outcome"] == ("extreme" if far else "identical"), (bits, after)
        assert (row["state_distance"] == 0) == (not far)


@pytest.mark.parametrize(
    ("thrown", "outcome", "error"),
    [
        ("stay", "degraded", None),
        ("refuse", "refused", "exit code 4; it last wrote: ValueError: a weight is far off"),
        ("crash", "crash", r"exit code 3; it last wrote: training .* \| lost the thread"),
        ("signal", "crash", "killed by SIGSEGV; it last wrote: "),
        ("hang", "hang", r"ended after 2 s \(campaign.timeout\)"),
        ("nan", "non-finite", None),
    ],
)
def test_what_a_command_does_when_a_weight_is_thrown_far_off_is_its_outcome(
    tmp_path: Path, thrown: str, outcome: str, error: str | None
) -> None:
    folder = project(tmp_path)
    timeout = 2 if thrown == "hang" else 60
    results, _ = run(folder, {"shell": LINE + thrown}, timeout=timeout)
    listed = list(rows(results))
    assert [row["outcome"] for row in listed] == [outcome] * 2
    logs = sorted(file.name for file in (folder / "out" / "logs").glob("*"))
    if error is None:
        assert [row["error"] for row in listed] == [None] * 2
        assert logs == []  # thrown away
        return
    assert all(re.match(error, row["error"]) for row in listed), listed
    assert logs == ["cell0-trial0.log", "cell0-trial1.log"]
    for log in logs:
        assert (folder / "out" / "logs" / log).read_text("utf-8").startswith("training  ")


def test_what_a_struck_run_told_before_it_failed_is_kept(tmp_path: Path) -> None:
    results, _ = run(project(tmp_path), {"shell": LINE + "crash"}, trials=1)
    (trial,) = results.trials
    assert [step for step, _, _ in trial.run.steps] == [1, 2]
    assert trial.run.last_step == 2
    results, _ = run(project(tmp_path / "refused"), {"shell": LINE + "refuse"}, trials=1)
    assert results.trials[0].run.steps == []


def test_without_output_nothing_is_identical(tmp_path: Path) -> None:
    folder = project(tmp_path)
    axes = {"bits": "0"}
    assert outcomes(folder, {"shell": WHOLE}, axes) == ["identical"] * 2
    assert outcomes(project(tmp_path / "b"), {"shell": LINE + "stay"}, axes) == ["masked"] * 2


def test_outputs_are_compared_by_their_tensors_and_not_by_the_bytes_around(tmp_path: Path) -> None:
    """The same tensors in a file of another header, with the time in it, are the same state."""
    writer = (
        "import json, struct, sys, time; data = open(sys.argv[1], 'rb').read(); "
        "size = struct.unpack('<Q', data[:8])[0]; header = json.loads(data[8:8 + size]); "
        "header['__metadata__'] = {'time': str(time.time_ns())}; text = json.dumps(header).encode(); "
        "open(sys.argv[2], 'wb').write(struct.pack('<Q', len(text)) + text + data[8 + size:])"
    )
    (tmp_path / "again.py").write_text(writer)
    folder = project(tmp_path)
    line = (
        (
            f"sh -c './train.sh {{checkpoint}} {{metrics}} {{workdir}}/state jsonl stay && {sys.executable} again.py "
            "{workdir}/state {output}'"
        )
        .replace("./train.sh", str(folder / "train.sh"))
        .replace("again.py", str(folder / "again.py"))
    )
    results, notes = run(folder, {"shell": line}, {"bits": "0"})
    assert notes == []
    assert [row["outcome"] for row in rows(results)] == ["identical"] * 2


def test_placeholders_and_axes_are_filled_in(tmp_path: Path) -> None:
    """Golden runs are made for each setting that a command asks for, and each is compared with its own."""
    folder = project(tmp_path)
    teller = (
        "import json, os, shutil, sys; told = dict(each.split('=', 1) for each in sys.argv[1:]); "
        "told['cwd'] = os.getcwd(); told['threads'] = os.environ['OMP_NUM_THREADS'];"
        "shutil.copy(told['checkpoint'], told['output']); "
        "open(os.environ['TOLD'] + '/' + str(os.getpid()), 'w').write(json.dumps(told)); "
        "open(told['metrics'], 'w').write(json.dumps({'step': 1, 'loss': 0, 'accuracy': float(told['seed'])}))"
    )
    (folder / "teller.py").write_text(teller)
    told = tmp_path / "told"
    told.mkdir()
    line = (
        f"env TOLD={told} {sys.executable} teller.py checkpoint={{checkpoint}} metrics={{metrics}} output={{output}} "
        "workdir={workdir} seed={seed} bits={bits} count={count} layout={parallel} literal={{seed}} layer={layer}"
    )
    axes = {"bits": ["sign", "exponent-msb"], "count": [1, 2], "layer": [["layer", "layer.weight"]]}
    results, _ = run(folder, {"a b": line, "other": line}, axes, training_seeds=[3, 5], trials=2, null_trials=0)
    found = [json.loads(file.read_text()) for file in told.iterdir()]
    assert len(found) == 2 * 4 * (2 * 2 + 2)  # layouts, settings; golden, control of two seeds, and two trials
    assert {each["seed"] for each in found} == {"3", "5"}
    assert {(each["layout"], each["bits"], each["count"]) for each in found} == {
        (layout, bits, count) for layout in ("a b", "other") for bits in axes["bits"] for count in ("1", "2")
    }
    assert {(each["literal"], each["layer"], each["threads"]) for each in found} == {
        ("{seed}", "layer,layer.weight", "1")
    }
    assert len({each["workdir"] for each in found}) == len(found)
    for each in found:
        assert each["cwd"] == each["workdir"]
        assert not Path(each["workdir"]).exists()
        assert {Path(each[name]).name for name in ("checkpoint", "output")} == {"weights.safetensors"}
    assert len(results.goldens) == 2 * 4 * 2
    for trial in results.trials:
        assert trial.golden.settings == trial.run.settings != ""
        assert json.loads(trial.run.settings)["bits"] == trial.cell.axes["bits"]
        assert trial.golden.metric == trial.run.metric == trial.run.training_seed


def test_the_altered_copy_has_the_planned_bits_and_the_original_none(tmp_path: Path) -> None:
    folder = project(tmp_path)
    original = (folder / "weights.safetensors").read_bytes()
    axes = {"bits": "exponent-msb", "count": [1, 3]}
    run(folder, {"shell": WHOLE, "twin": WHOLE}, axes, keep=True)
    assert (folder / "weights.safetensors").read_bytes() == original
    campaign = open_campaign(folder / "out")
    kept = {}
    for cell in campaign.cells:
        for trial in range(2):
            place = campaign.folder.trial(cell.number, trial)
            data = (place / "checkpoint" / "weights.safetensors").read_bytes()
            assert len(data) == len(original)
            bits = [
                8 * at + bit
                for at, (one, other) in enumerate(zip(original, data, strict=True))
                for bit in range(8)
                if (one ^ other) >> bit & 1
            ]
            assert len(bits) == cell.axes["count"]
            assert all(bit % 32 == 30 for bit in ((b - 8 * (len(original) - 40)) for b in bits))
            manifest = json.loads((place / "manifest.json").read_text())
            assert len(manifest["faults"]) == cell.axes["count"]
            assert (place / "metrics.jsonl").read_text().count("\n") == 4
            assert (place / "log").read_text().startswith("training ")
            assert json.loads((place / "record.json").read_text())["struck"] == cell.axes["count"]
            assert not (place / "output").exists()
            kept[cell.parallel, cell.axes["count"], trial] = set(bits)
    for trial in range(2):
        assert kept["shell", 1, trial] == kept["twin", 1, trial] < kept["shell", 3, trial] == kept["twin", 3, trial]


def test_several_checkpoints_have_golden_runs_of_their_own(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "states").mkdir()
    for number in (2, 10, 1):
        weights_file(folder / "states" / f"s{number}.safetensors", [1 + number / 100] * 4)
    results, _ = run(folder, {"shell": WHOLE}, {"checkpoint": "states/*.safetensors", "bits": "0"})
    assert [cell.axes["checkpoint"] for cell in results.campaign.cells] == [
        f"states/s{number}.safetensors" for number in (1, 10, 2)
    ]
    losses = {golden.checkpoint: golden.steps[0][1] for golden in results.goldens.values()}
    for number in (1, 2, 10):
        assert losses[f"states/s{number}.safetensors"] == pytest.approx((number / 200) ** 2, rel=1e-5)
    for trial in results.trials:
        assert trial.run.checkpoint == trial.golden.checkpoint == trial.cell.axes["checkpoint"]


def test_null_trials_get_another_seed_where_the_command_takes_one(tmp_path: Path) -> None:
    folder = project(tmp_path)
    line = "./train.sh {checkpoint} {metrics} {output} jsonl stay {seed}"
    results, notes = run(folder, {"shell": line}, tolerance="auto", null_trials=6)
    assert notes == []
    values = weights_in(folder / "weights.safetensors")
    assert len(results.nulls) == 6
    seeds = set()
    for null in results.nulls:
        assert null.seed is not None
        assert 0 <= null.seed < 2**31
        seeds.add(null.seed)
        losses, _ = expected(values, null.seed)
        assert null.loss == pytest.approx(losses[-1], rel=1e-6)
    assert len(seeds) == 6
    again, _ = run(folder, {"shell": line}, tolerance="auto", null_trials=6)
    assert [null.seed for null in again.nulls] == [null.seed for null in results.nulls]


def test_a_deterministic_command_without_a_seed_repeats_its_control_and_that_is_said(tmp_path: Path) -> None:
    results, notes = run(project(tmp_path), {"shell": WHOLE}, tolerance="auto", null_trials=2)
    (note,) = notes
    assert note.startswith("commands.shell is deterministic and has no {seed}: its null trials repeat the control")
    (golden,) = results.goldens.values()
    assert {null.state_digest for null in results.nulls} == {golden.state_digest}
    assert [band.width for band in results.bands.values()] == [0]


RANDOM = """
import json, random, shutil, sys
checkpoint, metrics, output = sys.argv[1:]
with open(metrics, "w") as file:
    for step in (1, 2):
        values = {"step": step, "loss": 1.0, "accuracy": 0.9 + random.random() / 50}
        print(json.dumps(values), file=file)
if output != "none":
    shutil.copy(checkpoint, output)
"""


def test_a_command_that_is_not_deterministic_goes_on_with_the_spread_of_its_control_as_band(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "random.sh").write_text(f"#!{sys.executable}\n{RANDOM}")
    (folder / "random.sh").chmod(0o755)
    line = "./random.sh {checkpoint} {metrics} none"
    results, notes = run(
        folder, {"noisy": line, "steady": LINE + "stay"}, {"bits": "0"}, tolerance="auto", null_trials=8, trials=3
    )
    noisy = next(note for note in notes if note.startswith("commands.noisy "))
    assert re.match(
        r"commands.noisy is not deterministic: its control differs from its golden run, at step 1 its metric is "
        r"0\.9\d+ and in the control 0\.9\d+; trials go on, but none can come out identical, and what the null trials "
        "differ by is the band",
        noisy,
    )
    assert len(notes) == 2
    golden = next(each for each in results.goldens.values() if each.parallel == "noisy")
    nulls = [null for null in results.nulls if null.parallel == "noisy"]
    assert len(nulls) == 8
    assert len({null.metric for null in nulls}) == 8
    usual = {step: metric for step, _, metric in golden.evals}
    worst = max(max(usual[step] - metric for step, _, metric in null.evals) for null in nulls if null.trial % 2 == 0)
    assert results.bands["noisy"].width == max(worst, 0)
    assert results.bands["steady"].width == 0
    assert {trial.run.plan for trial in results.trials if trial.run.parallel == "noisy"} == {""}  # no result is reused


def test_equal_plans_reuse_their_result_only_where_the_command_is_deterministic(tmp_path: Path) -> None:
    folder = project(tmp_path)
    weights_file(folder / "weights.safetensors", [0.5])
    (folder / "random.sh").write_text(f"#!{sys.executable}\n{RANDOM}")
    (folder / "random.sh").chmod(0o755)
    commands = {"steady": WHOLE, "noisy": "./random.sh {checkpoint} {metrics} {output}"}
    results, _ = run(folder, commands, {"bits": "sign"}, trials=3)  # one eligible bit
    reused = {(trial.run.parallel, trial.run.trial): trial.run.reused for trial in results.trials}
    assert [reused["noisy", number] for number in range(3)] == [None] * 3
    assert sum(reused["steady", number] is None for number in range(3)) == 1


def test_a_run_that_ends_sooner_is_measured_by_its_last_value_and_a_missing_one_is_nan(tmp_path: Path) -> None:
    folder = project(tmp_path)
    script = (
        "import struct, sys; data = open(sys.argv[1], 'rb').read(); "
        "thrown = not all(abs(each) < 9 for each in struct.unpack('<10f', data[-40:])); "
        "file = open(sys.argv[2], 'w'); print('step,loss,accuracy', file=file); "
        "rows = [(1, .5, .5), (2, .4, .6), (3, .3, .9)]; "
        "[print(*((s, l, '') if thrown and MODE == 'left out' and s == 3 else (s, l, a)), sep=',', file=file) "
        "for s, l, a in (rows[:2] if thrown and MODE == 'short' else rows)]"
    )
    found = {}
    for mode in ("short", "left out"):
        name = mode.replace(" ", "_")
        (folder / f"{name}.py").write_text(script.replace("MODE", repr(mode)))
        line = f"{sys.executable} {name}.py {{checkpoint}} {{metrics}}"
        results, _ = run(project(folder / name) and folder, {name: line}, {}, {"format": "csv"}, name=name)
        found[mode] = next(results.trials[0].run for _ in (1,))
        (folder / "out").rename(folder / f"out-{name}")
    assert [metric for _, _, metric in found["short"].evals] == [0.5, 0.6, 0.6]
    assert [step for step, _, _ in found["short"].evals] == [1, 2, 3]
    assert math.isnan(found["left out"].evals[-1][2])


def test_one_trial_can_be_run_again_by_itself(tmp_path: Path) -> None:
    run(project(tmp_path), {"shell": WHOLE}, {"bits": "any"}, trials=3)
    record = run_again(open_campaign(tmp_path / "out"), 0, 2, keep=True)
    assert record["as_stored"] is True
    assert record["kept"] is not None
    assert Path(record["kept"], "checkpoint", "weights.safetensors").is_file()


def failing(folder: Path, line: str, **values: Any) -> FlipperError:
    with pytest.raises(FlipperError) as caught:
        run(folder, {"own": line}, **values)
    return caught.value


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("nosuchprogram {checkpoint} {metrics}", UsageError,
         "commands.own: there is no executable 'nosuchprogram' on the PATH"),
        ("train.sh {checkpoint} {metrics}", UsageError,
         "commands.own: there is no executable 'train.sh' on the PATH; of FOLDER, write ./train.sh"),
        ("./gone.sh {checkpoint} {metrics}", UsageError, "commands.own: there is no file FOLDER/gone.sh"),
        ("./weights.safetensors {checkpoint} {metrics}", UsageError,
         "commands.own: FOLDER/weights.safetensors is not executable (chmod +x)"),
        ("sh -c 'exit 9' {checkpoint} {metrics}", TrainingError,
         "the golden run of commands.own failed: exit code 9; it last wrote: nothing; all that it wrote is in "),
        ("sh -c 'echo no such option >&2; exit 2' {checkpoint} {metrics}", TrainingError,
         "the golden run of commands.own failed: exit code 2; it last wrote: no such option; all that it wrote is in "),
        ("sh -c 'sleep 60' {checkpoint} {metrics}", TrainingError,
         "the golden run of commands.own failed: ended after 1 s (campaign.timeout)"),
        ("true {checkpoint} {metrics}", TrainingError,
         "the golden run of commands.own failed: exit code 0, but it told of no step"),
        ("sh -c 'echo words > $1' sh {metrics} {checkpoint}", TrainingError, "told of no step"),
        ("""sh -c 'echo "{\\"loss\\": 1, \\"step\\": 1}" > $1' sh {metrics} {checkpoint}""", UsageError,
         "the golden run of commands.own can't be used: it told of no 'accuracy' (seen: loss, step)"),
        ("./train.sh {checkpoint} {metrics} none jsonl stay {output}", UsageError,
         "the golden run of commands.own can't be used: OUTPUT does not exist"),
        ("sh -c './train.sh $0 $1 none jsonl stay && echo text > $2' {checkpoint} {metrics} {output}", CheckpointError,
         "the golden run of commands.own can't be used: OUTPUT: this file is no checkpoint that flipper knows"),
        ("sh -c 'echo OSError: [Errno 98] Address already in use; exit 1' {checkpoint} {metrics}", TrainingError,
         "a command failed (exit code 1): its port is taken: runs that fix a port can't run side by side"),
        ("sh -c 'echo write: No space left on device; exit 1' {checkpoint} {metrics}", OutputError,
         "a command failed (exit code 1): no space left where it writes; runs have their folders in "),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_one_error_before_any_trial(
    tmp_path: Path, line: str, kind: type[FlipperError], message: str
) -> None:
    folder = project(tmp_path)
    line = line.replace("'./train.sh", f"'{folder}/train.sh")
    error = failing(folder, line, timeout=1)
    assert type(error) is kind, error
    told = re.sub(r"/\S+/output/weights\.safetensors", "OUTPUT", str(error))
    assert message.replace("FOLDER", str(folder)) in told
    assert "\n" not in str(error)
    if "all that it wrote is in" in str(error):
        assert Path(str(error).rpartition(" is in ")[2]).is_file()


def test_a_trial_that_a_full_disk_breaks_is_no_result(tmp_path: Path) -> None:
    """The first runs go well; then the disk is full, and the campaign stops rather than count it against the faults."""
    folder = project(tmp_path)
    line = (
        f"sh -c '{folder}/train.sh $0 $1 none jsonl stay; echo >> {folder}/count; "
        f"[ $(wc -l < {folder}/count) -lt 3 ] || {{ echo cp: No space left on device; exit 1; }}' "
        "{checkpoint} {metrics}"
    )
    error = failing(folder, line, workers=1)
    assert isinstance(error, OutputError)
    assert str(error).startswith("cell 0, trial 0: a command failed (exit code 1): no space left")
    assert (folder / "out" / "logs" / "cell0-trial0.log").read_text().endswith("cp: No space left on device\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("said", ["no space left where it writes; runs have their folders in ", "no space left in "])
def test_a_disk_that_fills_up_ends_the_campaign(said: str, tmp_path: Path, small_disk: Path) -> None:
    """Also where the command says nothing of it, or can't, since what it says lies on the same disk."""
    folder = project(tmp_path / "project")
    silent = "2> /dev/null" if said == "no space left in " else ""
    fill = f"head -c 2000000 /dev/zero > state {silent}"
    text = f"{folder}/train.sh $0 $1 none jsonl stay; [ $2 = mantissa ] || {fill}"
    (folder / "own.toml").write_text(
        f"""
        campaign = {{name = "own", tolerance = 0.1, trials = 1}}
        commands.own = '''sh -c "{text}" {{checkpoint}} {{metrics}} {{bits}}'''
        axes = {{checkpoint = "weights.safetensors", bits = ["mantissa"]}}
        """
    )
    run_it = [sys.executable, "-m", "flipper", "campaign", "run", "own.toml", "--workers", "1"]
    options = {"cwd": folder, "capture_output": True, "text": True, "check": False}
    environment = {**os.environ, "TMPDIR": str(small_disk)}
    assert subprocess.run(run_it, env=environment, **options).returncode == 0  # type: ignore[call-overload]
    done = subprocess.run(  # type: ignore[call-overload]
        [*run_it, "--set", "axes.bits=mantissa,sign"], env=environment, **options
    )
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert f"{said}{small_disk}" in line
    assert len(list(rows(run_results(folder, "own")))) == 1


def test_a_pattern_that_would_overlook_a_run_that_breaks_down_is_refused_by_the_golden_run(tmp_path: Path) -> None:
    pattern = [r"^\[(?P<step>\d+)/4\] loss=(?P<loss>[\d.e-]+)", r"accuracy after \d+: (?P<accuracy>\S+)%"]
    error = failing(
        project(tmp_path),
        "./train.sh {checkpoint} {metrics} none stdout nan",
        metrics={"format": "stdout", "pattern": pattern},
    )
    assert str(error).startswith(
        "the golden run of commands.own can't be used: metrics.pattern does not read a loss of nan in a line like"
    )


def test_the_log_of_a_run_that_has_failed_is_gone_when_it_ends_well(tmp_path: Path) -> None:
    folder = project(tmp_path)
    line = f"sh -c '[ -e {folder}/ready ] && {folder}/train.sh $0 $1 none jsonl stay' {{checkpoint}} {{metrics}}"
    failing(folder, line)
    (log,) = (folder / "out" / "logs").iterdir()
    (folder / "ready").touch()
    run(folder, {"own": line})
    assert not log.exists()


def test_what_is_no_checkpoint_is_said_before_the_golden_run(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "weights.safetensors").write_bytes(b"not a checkpoint at all")
    error = failing(folder, f"sh -c 'touch {folder}/ran; true' {{checkpoint}} {{metrics}}")
    assert isinstance(error, CheckpointError)
    assert "weights.safetensors" in str(error)
    assert not (folder / "ran").exists()


def test_a_checkpoint_that_changes_between_two_calls_is_refused_and_one_that_is_touched_is_not(tmp_path: Path) -> None:
    folder = project(tmp_path)
    checkpoint = folder / "weights.safetensors"
    run(folder, {"own": WHOLE}, trials=1)
    os.utime(checkpoint, ns=(1, 1))
    run(folder, {"own": WHOLE}, trials=2)
    weights_file(checkpoint, [0.25] * 10)
    error = failing(folder, WHOLE, trials=3)
    assert str(error).endswith("weights.safetensors has changed since its golden run; choose another --out")
    assert len(list(rows(run_results(folder)))) == 2


@pytest.mark.parametrize("line", [WHOLE, WHOLE.replace("./", "bash ")])
def test_what_a_command_is_run_from_may_neither_change_nor_go_between_two_calls(line: str, tmp_path: Path) -> None:
    """Its trials would be compared with a golden run of something else, or all fail, and not for their faults."""
    folder = project(tmp_path)
    script = folder / "train.sh"
    text = script.read_text()
    run(folder, {"own": line}, trials=1)
    script.write_text(f"{text}\n# faster\n")
    assert str(failing(folder, line, trials=2)) == f"{script} has changed since its golden run; choose another --out"
    script.unlink()
    assert str(failing(folder, line, trials=2)).startswith(f"{script} is not there any more: put it back")
    script.write_text(text)
    script.chmod(0o755)
    results, _ = run(folder, {"own": line}, trials=2)
    assert [row["outcome"] for row in rows(results)] == ["extreme"] * 2


def test_what_a_command_writes_beside_it_may_change(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "log.txt").touch()
    line = "sh -c 'echo run >> $2; ./train.sh $0 $1 none jsonl stay' {checkpoint} {metrics} log.txt"
    line = line.replace("./train.sh", str(folder / "train.sh"))
    run(folder, {"own": line}, trials=1)
    run(folder, {"own": line}, trials=2)
    assert (folder / "log.txt").read_text().count("run") >= 4


def test_a_checkpoint_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = project(tmp_path)
    run(folder, {"own": WHOLE}, trials=1)
    (folder / "weights.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(UsageError, match=r"weights\.safetensors is not there any more: put it back; where"):
        run_again(open_campaign(folder / "out"), 0, 0)


def run_results(folder: Path, name: str = "out") -> Results:
    return load_results(open_campaign(folder / name))


def test_another_command_is_refused_where_there_are_results(tmp_path: Path) -> None:
    folder = project(tmp_path)
    run(folder, {"own": WHOLE}, trials=1)
    assert "out has results with commands.own = " in str(failing(folder, WHOLE + " "))


@pytest.mark.parametrize("gone", ["train.sh", "weights.safetensors"])
def test_more_trials_that_cannot_be_made_leave_the_campaign_as_it_was(tmp_path: Path, gone: str) -> None:
    folder = project(tmp_path)
    run(folder, {"own": WHOLE}, trials=1)
    before = open_campaign(folder / "out")
    (folder / gone).rename(folder / "elsewhere")
    failing(folder, WHOLE, trials=2)
    assert open_campaign(folder / "out") == before
    (folder / "elsewhere").rename(folder / gone)
    run(folder, {"own": WHOLE}, trials=2)
    assert [cell.trials for cell in open_campaign(folder / "out").cells] == [2]


def test_the_seconds_that_a_campaign_has_run_are_kept_with_each_result(tmp_path: Path) -> None:
    folder = project(tmp_path)
    asked = planned(spec_of(document({"own": WHOLE}, {}, {}, trials=2), folder), folder / "out")
    told = []

    def look(progress: Progress) -> None:
        with Store(asked.folder.results()) as store:
            told.append(store.facts().get("seconds", 0.0))

    with open_engine("local", 1) as engine:
        run_campaign(asked, engine, on_progress=look)
    assert told == sorted(told)
    assert len(set(told)) == 1 + 1 + 2  # before any, with the golden run, and with each trial


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_campaign_that_is_ended_leaves_no_command_behind_and_goes_on_later(tmp_path: Path, number: int) -> None:
    """Its command has a child in a session of its own; the second trial waits for a file when the end comes."""
    folder = project(tmp_path / "project")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    text = (
        f"echo >> {folder}/count; {folder}/train.sh $1 $2 none jsonl stay; "
        f"[ $(wc -l < {folder}/count) -lt 4 ] && exit; "
        f"setsid sh -c 'echo $$ > {folder}/pid; exec sleep 600' & "
        f"while [ ! -e {folder}/go ]; do sleep 0.05; done"
    )
    (folder / "wait.sh").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "wait.sh").chmod(0o755)
    (folder / "own.toml").write_text(
        """
        campaign = {name = "own", seed = 2, tolerance = 0.05, trials = 3}
        commands.own = "./wait.sh {checkpoint} {metrics}"
        axes = {checkpoint = "weights.safetensors", bits = "exponent-msb"}
        """
    )
    words = [sys.executable, "-m", "flipper", "campaign", "run", "own.toml", "--workers", "1", "--format", "json"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as campaign:
        assert until(lambda: (folder / "pid").exists() and (folder / "pid").read_text() != "")
        pid = int((folder / "pid").read_text())
        campaign.send_signal(number)
        _, said = campaign.communicate(timeout=60)
    assert campaign.returncode == (-number if number == signal.SIGKILL else 130)
    assert "Traceback" not in said
    assert until(lambda: not alive(pid))
    if number == signal.SIGINT:
        assert list(temporary.iterdir()) == []
    (folder / "go").touch()
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"degraded": 3}
    runs = {"golden": 1, "control": 1, "first": 1, "second": 2, "third": 1}
    assert (folder / "count").read_text() == "\n" * sum(runs.values())
    assert list(temporary.iterdir()) == []


def test_from_the_shell_with_its_warning_and_without_torch(tmp_path: Path) -> None:
    """As users type it, in another folder than the campaign file's; nothing of it imports torch."""
    folder = project(tmp_path / "project with a space")
    (folder / "own.toml").write_text(
        """
        [campaign]
        name = "own"
        trials = 2
        null_trials = 1
        [axes]
        checkpoint = "*.safetensors"
        [commands]
        shell = "./train.sh {checkpoint} {metrics} none csv stay"
        [metrics]
        format = "csv"
        step = "iteration"
        loss = "train"
        metric = "acc"
        """
    )
    code = "import sys; sys.modules['torch'] = None; from flipper.cli import main; main()"
    arguments = ["campaign", "run", folder / "own.toml", "--set", "axes.bits=exponent-msb", "--set",
                 "metrics.metric=acc", "--format", "json", "--out=-its results"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"degraded": 2}
    assert done.stderr.count("warning: commands.shell is deterministic and has no {seed}") == 1
    assert "`flipper campaign report './-its results'` shows them" in done.stderr
    record = json.loads((tmp_path / "-its results" / "campaign.json").read_text())
    assert record["spec"]["here"] == str(folder)
    assert record["spec"]["metric"] == "acc"
    assert [cell["axes"]["checkpoint"] for cell in record["cells"]] == ["weights.safetensors"]


def test_the_loss_alone_can_be_what_is_compared(tmp_path: Path) -> None:
    folder = project(tmp_path)
    results, _ = run(folder, {"own": LINE + "stay"}, metric="loss", tolerance=0.001)
    assert results.campaign.spec.better == "lower"
    assert [row["outcome"] for row in rows(results)] == ["degraded"] * 2
    (golden,) = results.goldens.values()
    assert golden.metric == golden.loss


def test_a_directory_checkpoint_is_copied_whole(tmp_path: Path) -> None:
    """As Hugging Face shards: an index and files, and what else lies there."""
    folder = project(tmp_path)
    shards = folder / "step-5"
    shards.mkdir()
    weights_file(shards / "a.safetensors", [0.5, 0.75])
    index = {"metadata": {"total_size": 8}, "weight_map": {"layer.weight": "a.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (shards / "note.txt").write_text("kept")
    text = f"cat $0/note.txt && {folder}/train.sh $0/a.safetensors $1 none jsonl stay"
    results, _ = run(folder, {"own": f"sh -c '{text}' {{checkpoint}} {{metrics}}"}, {"checkpoint": "step-5"})
    assert [row["outcome"] for row in rows(results)] == ["degraded"] * 2


def test_when_the_checkpoint_was_saved_can_be_said(tmp_path: Path) -> None:
    results, _ = run(project(tmp_path), {"own": LINE + "stay"}, inject_step=0, trials=1)
    assert {golden.first_step for golden in results.goldens.values()} == {0}
    assert spec_of(document({"own": LINE}, {}, {}, inject_step=7), tmp_path).inject_step == 7
