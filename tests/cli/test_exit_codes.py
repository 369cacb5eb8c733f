"""Exit codes and errors: 0 done, 1 failed, 2 wrong usage, 3 a finding, 4 no readable checkpoint; one or two lines."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cli_tools import CNN, COMMAND, ENVIRONMENT, MLP, ROOT, flipper, here, is_one_error, on_terminal
from safetensors.numpy import save_file

from flipper import cli
from flipper.errors import MismatchError

TEXT = ROOT / "LICENSE"


@pytest.fixture
def struck(tmp_path):
    """An altered copy with its manifest."""
    path = tmp_path / "struck.pt"
    assert here("inject", MLP, "-o", path, "--seed", "1", "--count", "3")[0] == 0
    return path


def manifest(path):
    return path.with_name(path.name + ".flipper.json")


DEMO = ROOT / "scripts/campaigns/demo.toml"

def costs(folder):
    """What things take, for a simulation."""
    path = folder / "costs.toml"
    path.write_text("step = 1\n")
    return path


DONE = {
    "inspect": lambda s, t: ["inspect", s],
    "inject": lambda s, t: ["inject", s, "-o", t / "x", "--seed", "1"],
    "diff": lambda s, t: ["diff", s, s],
    "verify": lambda s, t: ["verify", s, "--manifest", manifest(s), "--source", MLP],
    "undo": lambda s, t: ["undo", s],
    "replay": lambda s, t: ["replay", manifest(s), MLP, "-o", t / "x"],
    "convert": lambda s, t: ["convert", s, "-o", t / "x", "--to", "hdf5"],
    "size": lambda s, t: ["size", "--population", "9"],
    "train": lambda s, t: ["train", "--list"],
    "completion": lambda s, t: ["completion", "zsh"],
    "simulate": lambda s, t: [
        "simulate", "digits-mlp", "--workers", "2", "--steps", "1", "--mtbf", "1h", "--recovery", "lossy",
        "--seed", "1", "--costs", costs(t),
    ],
    "campaign": lambda s, t: ["campaign", "show", DEMO, "--no-timing"],
    "study": lambda s, t: ["study", "mesh", "--shape", "4x4", "--failed", "0,1"],
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_0_when_done(command, struck, tmp_path):
    code, out, err = here(*DONE[command](struck, tmp_path))
    assert (code, "error" in err) == (0, False)
    assert out or command == "diff"


def failing(s, t):
    """Command lines with the exit code that each must have."""
    none, taken, text = t / "none", t / "taken", TEXT
    for name, length in (("short", 4), ("long", 5)):
        save_file({"w": np.ones(length, np.float32)}, t / name)
    assert here("inject", t / "short", "--in-place", "--seed", "1")[0] == 0
    taken.write_bytes(b"mine")
    wrong = [
        ["inspect"], ["inspect", none], ["inspect", s, "--nope"], ["inspect", s, "--bits", "nope"],
        ["inspect", s, "--format", "xml"], ["inspect", s, "--layer", "nope"], ["inspect", s, s],
        ["inject", s], ["inject", none, "-o", t / "x"], ["inject", s, "-o", t / "x", "--in-place"],
        ["inject", s, "-o", t / "x", "--count", "1", "--ber", "0.1"], ["inject", s, "-o", t / "x", "--seed", "-1"],
        ["inject", s, "-o", t / "x", "--plan", none], ["inject", s, "-o", t / "x", "--dtype", "bool"],
        ["inject", s, "-o", s, "--force"],
        ["diff", s], ["diff", s, none], ["verify", none], ["verify", s, "--source", MLP], ["undo", none],
        ["undo", s, "--manifest", none], ["undo", MLP],
        ["replay", none, MLP, "-o", t / "x"], ["replay", manifest(s), none, "-o", t / "x"],
        ["replay", manifest(s), MLP], ["convert", s, "-o", t / "x"], ["convert", s, "-o", t / "x", "--to", "zarr"],
        ["convert", none, "-o", t / "x", "--to", "hdf5"], ["size"], ["size", "--population", "x"],
        ["size", "--population", "9", "--margin", "2"], ["train"], ["train", "nope"],
        ["train", "digits-mlp", "--resume", none], ["completion"], ["completion", "tcsh"], ["nope"], ["--nope"],
    ]  # fmt: skip
    failed = [
        ["inject", s, "-o", taken], ["inject", s, "-o", none / "x"], ["inject", s, "-o", t / "x", "--count", "1000000"],
        ["inject", s, "-o", t / "x", "--manifest", taken], ["inject", s, "-o", t, "--force"],
        ["replay", manifest(s), MLP, "-o", taken], ["replay", manifest(s), MLP, "-o", none / "x"],
        ["replay", text, MLP, "-o", t / "x"], ["replay", manifest(t / "short"), t / "long", "-o", t / "x"],
        ["convert", s, "-o", taken, "--to", "hdf5"], ["convert", s, "-o", none / "x", "--to", "hdf5"],
        ["undo", s, "--manifest", text], ["verify", s, "--manifest", text],
        ["train", "digits-mlp", "--metrics", taken],
    ]  # fmt: skip
    unreadable = [
        ["inspect", text], ["inspect", taken], ["inspect", ROOT / "tests"], ["inject", text, "-o", t / "x"],
        ["inject", text, "--in-place"], ["inject", text, "--dry-run"], ["diff", s, text], ["diff", text, s],
        ["verify", text], ["verify", s, "--manifest", manifest(s), "--source", text],
        ["replay", manifest(s), text, "-o", t / "x"], ["convert", text, "-o", t / "x", "--to", "hdf5"],
        ["train", "digits-mlp", "--resume", text],
    ]  # fmt: skip
    return [(2, case) for case in wrong] + [(1, case) for case in failed] + [(4, case) for case in unreadable]


def test_each_failure_has_its_code_one_or_two_lines_and_leaves_nothing(struck, tmp_path):
    before = None
    for code, arguments in failing(struck, tmp_path):
        now = {path: path.read_bytes() for path in tmp_path.iterdir()}
        before = before or now
        got, out, err = here(*arguments)
        said = "".join(line for line in err.splitlines(True) if not line.startswith("seed "))
        assert (got, out) == (code, ""), (arguments, err)
        assert is_one_error(said), (arguments, err)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before, arguments


def test_3_is_a_finding(struck):
    assert here("diff", MLP, struck)[0] == 3
    assert here("diff", MLP, struck, "--summary")[0] == 3
    assert here("verify", MLP, "--manifest", manifest(struck))[0] == 3
    assert here("verify", struck, "--manifest", manifest(struck), "--source", CNN)[0] == 3


def test_without_a_command_the_help_is_on_stderr_and_the_code_2():
    code, out, err = here()
    assert (code, out) == (2, "")
    assert err == here("--help")[1]


def test_an_unknown_command_names_close_ones_or_all():
    assert "did you mean inject or inspect?" in here("injct")[2]
    assert ", ".join(cli.COMMANDS) in here("zzz")[2]


def test_errors_of_click_say_where_help_is():
    assert here("inject", MLP, "--cuont", "1")[2].splitlines()[1] == "Try 'flipper inject --help' for help."


def test_traceback_shows_where_an_error_came_from_and_keeps_the_code():
    done = flipper("inspect", TEXT, "--traceback")
    assert done.returncode == 4
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.splitlines()[-1].startswith("flipper: error: ")


BROKEN = "import flipper.checkpoints as c, flipper.cli\nc.open_checkpoint = None\nflipper.cli.main()"


def test_an_unexpected_exception_is_one_line_too():
    for more, lines in (([], 1), (["--traceback"], None)):
        command = [sys.executable, "-c", BROKEN, "inspect", str(MLP), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("flipper: error: internal error: TypeError: ")
        assert "--traceback shows where" in last
        assert ("Traceback" in done.stderr) == (lines is None)


def test_a_message_is_one_line_whatever_is_in_it(monkeypatch):
    def refuse(path):
        raise MismatchError("a\nb\r\x1b[31m\u2028c")

    monkeypatch.setattr("flipper.checkpoints.open_checkpoint", refuse)
    err = here("inspect", MLP)[2]
    assert (len(err.splitlines()), err[:-1].isprintable(), err[-1]) == (1, True, "\n")


@pytest.fixture
def slow(tmp_path):
    """A command that takes some seconds over a file, writing a copy: convert of 400 MB of zeros, mostly a hole."""
    header = b'{"w":{"dtype":"F32","shape":[100000000],"data_offsets":[0,400000000]}}'
    header += b" " * (-len(header) % 8)
    with open(tmp_path / "big", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 400_000_000)
    return ["convert", str(tmp_path / "big"), "-o", str(tmp_path / "out"), "--to", "hdf5"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_it_quietly_without_temporary_files(slow, tmp_path, number):
    process = subprocess.Popen(
        [*COMMAND, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup the tests themselves ignore SIGHUP
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(".tmp" in name for name in os.listdir(tmp_path)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (128 + number, b"", b"")
    assert os.listdir(tmp_path) == ["big"]


def test_signals_that_the_parent_ignores_stay_ignored():
    """nohup starts its command with SIGHUP ignored."""
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "import flipper.cli as c, os\n"
        "c.cli.callback = lambda: os.kill(os.getpid(), signal.SIGHUP)\n"
        "c.main(['size', '--population', '9'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_handlers_are_put_back():
    former = signal.getsignal(signal.SIGTERM)
    here("size", "--population", "9")
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize("tie", ["link", "symlink"])
def test_in_place_through_links_is_wrong_usage(tmp_path, tie):
    shutil.copy(MLP, tmp_path / "a")
    getattr(os, tie)(tmp_path / "a", tmp_path / "b")
    code, _, err = here("inject", tmp_path / "b", "--in-place", "--seed", "1", "-q")
    assert (code, is_one_error(err)) == (2, True)
    assert (tmp_path / "a").read_bytes() == MLP.read_bytes()
    assert here("inject", tmp_path / "b", "--in-place", "--seed", "1", "--force")[0] == 0


def test_no_prompt_ever(tmp_path):
    """Even on a terminal: an existing output is an error, not a question."""
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "a")
    (tmp_path / "b").touch()
    code, out, err = on_terminal("inject", tmp_path / "a", "-o", tmp_path / "b", "--seed", "1")
    assert (code, out) == (1, "")
    assert err == f"flipper: error: {tmp_path / 'b'} exists; --force overwrites\n"
