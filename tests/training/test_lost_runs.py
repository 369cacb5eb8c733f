"""Runs that come to harm: a rank killed or stopped from outside, Ctrl-C, and layouts that a recipe doesn't fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import pytest
from processes import alive, descendants, ranks_below, wait_until
from safetensors.numpy import load_file
from series import spec

from flipper.cli import main
from flipper.errors import EndedError, TrainingError
from flipper.training.run import train
from flipper.training.spec import Event

TALKATIVE = """
import sys, time, torch
from torch import nn
from flipper.training import Data, Recipe, accuracy

def data(folder):
    print("the data has 48 samples", file=sys.stderr, flush=True)
    features = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    targets = (features.sum(dim=1) > 2).long()
    return Data(features[:48], targets[:48], features[48:], targets[48:])

def model():
    time.sleep(0.01)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

OWN = Recipe("own", model, data, nn.functional.cross_entropy, accuracy, sgd, 16, cuts=("2",))
"""

WIDE = "nn.Linear(4, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2)"


@contextmanager
def start(folder: Path, *arguments: str, text: str = TALKATIVE) -> Iterator[subprocess.Popen[str]]:
    """`flipper train` of a million steps in a process group of its own, once it has taken some and saved twice."""
    (folder / "own.py").write_text(text)
    (folder / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": f"{folder}/temporary"}
    command = [sys.executable, "-m", "flipper", "train", "own.py:OWN", "--steps", "1000000", "--seed", "1"]
    options = ["--metrics", "m.jsonl", "--save", "run", "--save-every", "20", *arguments]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            saved = folder / "run" / "step-000040.safetensors"
            wait_until(lambda: saved.exists() or process.poll() is not None)
            if not saved.exists():
                process.kill()
                pytest.fail(process.communicate()[1])
            yield process
        except BaseException:
            process.kill()  # else a test that fails would wait for a million steps
            raise


def left_in_order(folder: Path, below: list[int]) -> None:
    """No process and no folder is left; every checkpoint and every line of metrics is whole."""
    assert wait_until(lambda: not any(map(alive, below)))
    assert wait_until(lambda: not list((folder / "temporary").glob("flipper-*")))
    saved = sorted(path.name for path in (folder / "run").iterdir())
    assert saved[0] == "last"
    assert all(name.startswith("step-") and name.endswith("0.safetensors") for name in saved[1:])
    for name in saved[1:]:
        assert int(load_file(folder / "run" / name)["progress.step"]) == int(name[5:-12])
    assert (folder / "run" / "last").read_text().strip() in saved[-2:]
    for line in (folder / "m.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_rank_that_is_killed_ends_the_run_with_its_number_its_signal_and_its_last_words(tmp_path: Path) -> None:
    with start(tmp_path, "--parallel", "ddp:2", "-q") as process:
        below = descendants(process.pid)
        os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    died = "flipper: error: rank 1 of 2 died (killed by SIGKILL); it last wrote: the data has 48 samples\n"
    assert err == died
    left_in_order(tmp_path, below)


def test_ctrl_c_ends_the_run_and_leaves_whole_files_alone(tmp_path: Path) -> None:
    """Sent to the whole process group, as a terminal does."""
    with start(tmp_path, "--parallel", "pipeline:2", "-q") as process:
        below = descendants(process.pid)
        assert len(ranks_below(process.pid)) == 2
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (128 + signal.SIGINT, "", "")
    left_in_order(tmp_path, below)


@pytest.mark.parametrize("preloaded", [1, 400, 1300, 1900])
def test_ctrl_c_while_torch_is_imported_shows_no_traceback_and_leaves_nothing(tmp_path: Path, preloaded: int) -> None:
    """Sent to the process group once the server has mapped so many parts of files into its memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "flipper", "train", "digits-mlp", "--steps", "1000000", "--seed", "1", "-q"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:

        def importing() -> bool:
            return any(b"forkserver" in command_of(pid) and mapped(pid) >= preloaded for pid in below())

        def below() -> list[int]:
            return descendants(process.pid)

        assert wait_until(importing)
        found = below()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (128 + signal.SIGINT, "", "")
    assert wait_until(lambda: not any(map(alive, found)), 10)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def mapped(pid: int) -> int:
    """How many parts of files a process has in its memory: grows while it imports."""
    try:
        return Path(f"/proc/{pid}/maps").read_bytes().count(b"/")
    except OSError:
        return -1


@pytest.mark.parametrize(("layout", "rank"), [("ddp:2", 0), ("pipeline:2", 1), ("single", 0)])
def test_a_rank_that_is_stopped_from_outside_is_named_after_the_timeout(layout: str, rank: int) -> None:
    server: list[int] = []

    def stop_once(event: Event) -> None:
        if event["event"] == "step" and event["step"] >= 3 and not server:
            server.append(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
            os.kill(ranks_below(server[0])[rank], signal.SIGSTOP)

    with pytest.raises(TrainingError, match=rf"^rank {rank}( of 2)? is stopped; .*--timeout"):
        train(spec("digits-mlp", layout, steps=10**6, timeout=1.0), stop_once)
    assert wait_until(lambda: not ranks_below(server[0]))


def test_ranks_that_are_ended_with_their_server_have_not_crashed() -> None:
    """As a batch system does, which sends SIGTERM to every process of a job; the next run has a new server."""
    servers: list[int] = []

    def end_all(event: Event) -> None:
        if event["event"] == "step" and event["step"] == 3:
            servers.append(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
            for pid in (servers[0], *ranks_below(servers[0]).values()):
                os.kill(pid, signal.SIGTERM)

    with pytest.raises(EndedError, match=r"^rank \d of 2 (was ended, and the server|died \(killed by SIGTERM\))"):
        train(spec("digits-mlp", "ddp:2", steps=10**6), end_all)
    assert train(spec("digits-mlp", "ddp:2", steps=2)).steps == 2
    assert forkserver._forkserver._forkserver_pid not in (None, *servers)  # type: ignore[attr-defined]


def test_an_interrupted_call_leaves_no_rank_and_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    """As a notebook's interrupt does, while the first rank writes 34 MB; a file that was there before stays."""
    wide = TALKATIVE.replace("nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)", WIDE)
    (tmp_path / "own.py").write_text(wide)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".flipper-0123456789ab.tmp").write_text("of another process")

    def interrupt(event: Event) -> None:
        if event["event"] == "step" and wait_until(lambda: len(list(folder.glob(".flipper-*.tmp"))) > 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(spec(f"{tmp_path}/own.py:OWN", "ddp:3", steps=10**6, save=folder, save_every=1), interrupt)
    assert wait_until(lambda: not ranks_below(forkserver._forkserver._forkserver_pid))  # type: ignore[attr-defined]
    assert [path.name for path in folder.glob(".*")] == [".flipper-0123456789ab.tmp"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_a_recipe_has_started_ends_with_an_interrupted_run(tmp_path: Path, number: signal.Signals) -> None:
    helper = 'import subprocess\n    subprocess.Popen(["sleep", "1000"])\n    print("the data has'
    with start(tmp_path, "--parallel", "ddp:2", "-q", text=TALKATIVE.replace('print("the data has', helper)) as process:
        below = descendants(process.pid)
        sleeping = [pid for pid in below if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")]
        process.send_signal(number)
        process.communicate(timeout=60)
    assert len(sleeping) == 2
    assert wait_until(lambda: not any(map(alive, below)))


SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "digits-cnn.pt"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["digits-mlp", "--parallel", "pipeline:4"],
            2,
            "pipeline:4: digits-mlp has at most 3 stages (cut before fc2, f",
        ),
        (["digits-mlp", "--parallel", "tensor:3"], 2, "tensor:3: fc1.weight has 64 slices, which 3 ranks don't divide"),
        (
            ["digits-mlp", "--parallel", "ddp:3+pipeline:2"],
            2,
            "ddp:3+pipeline:2: digits-mlp's batch of 64 is no multiple of 3 x 4 micro-batches",
        ),
        (["digits-mlp", "--parallel", "ddp:2", "--device", "cuda"], 2, "2 ranks need a GPU each; "),
        (["cifar10-vgg", "--parallel", "ddp:2"], 2, "--data-dir"),
        (["cifar10-vgg", "--data-dir", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (
            ["digits-mlp", "--resume", str(SAMPLE), "--parallel", "fsdp:2"],
            1,
            "not a checkpoint of digits-mlp: missing: model.fc1.bias, model.fc1.weight, model.fc2.bias, ",
        ),
        (["digits-cnn", "--resume", str(SAMPLE.parent)], 4, "sample_checkpoints"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            ["train", *arguments, "--steps", "40", "--save", str(tmp_path / "run"), "--metrics", f"{tmp_path}/m", "-q"]
        )
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert err.startswith("flipper: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
