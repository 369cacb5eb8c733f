"""`flipper train` from outside: ends cleanly on signals, says what is missing; training itself has its own tests."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_tools import COMMAND, ENVIRONMENT, ROOT, flipper


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_all_ranks(tmp_path, number):
    command = [*COMMAND, "train", "digits-mlp", "--epochs", "5000", "--parallel", "ddp:2", "--seed", "1"]
    process = subprocess.Popen(
        [*command, "--metrics", str(tmp_path / "metrics")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "metrics").exists() or '"loss"' not in (tmp_path / "metrics").read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err.strip()) == (128 + number, b"", b"")
    deadline = time.monotonic() + 60
    while in_session(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [name for name in os.listdir(tmp_path) if name.startswith("flipper-")] == []


def in_session(session):
    """Processes that the command started and that are still there."""
    alive = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, _, found = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(found) == session and state != "Z":
            alive.append(int(name))
    return alive


@pytest.mark.parametrize("package", ["torch", "sklearn"])
def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, package):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package}', name={package!r})")
    done = flipper("train", "digits-mlp", "--steps", "1", "-q", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    message = f"training needs {package}, which is not installed; pip install 'flipper-ckpt[train]'"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"flipper: error: {message}\n")
