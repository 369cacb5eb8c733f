"""Running the command line as a user does: in a process, in this one, or on a terminal."""

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import click

from flipper.cli import main

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_checkpoints"
CNN = SAMPLES / "digits-cnn.pt"
MLP = SAMPLES / "digits-mlp.pt"

SIZED = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
"""What would speak over the terminal's own properties; pytest's workers inherit some of it."""

ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in SIZED} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TERM": "xterm-256color",
}
COMMAND = [sys.executable, "-m", "flipper"]


def flipper(*arguments, cwd=None, stdin=None, **environment):
    """Run `flipper ARGUMENTS` in a process; text in and out."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd or ROOT,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | environment,
        timeout=60,
        check=False,
    )


def here(*arguments):
    """The same in this process, which is quick: exit code, stdout, stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code or 0
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)
    return code, out, err


def rows_of(*arguments):
    """The records that a successful command prints as JSON lines."""
    code, out, err = here(*arguments, "--format", "jsonl")
    assert code == 0, err
    return [strict(line) for line in out.splitlines()]


def strict(text):
    """Parsed as JSON proper: no bare NaN or Infinity, no key twice."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    def once(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def on_terminal(*arguments, out=True, err=True, cwd=None, command=None, **environment):
    """Exit code, stdout and stderr as text where either is a terminal (of its own) or a pipe."""
    masters, slaves = zip(*(pty.openpty() if terminal else os.pipe() for terminal in (out, err)), strict=True)
    process = subprocess.Popen(
        command or [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=slaves[0],
        stderr=slaves[1],
        cwd=cwd or ROOT,
        env=ENVIRONMENT | environment,
    )
    for slave in slaves:
        os.close(slave)
    texts = dict.fromkeys(masters, b"")
    waiting, deadline = set(masters), time.monotonic() + 60
    while waiting and time.monotonic() < deadline:
        for master in select.select(list(waiting), [], [], 1)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # a terminal without a process on it
                piece = b""
            texts[master] += piece
            if not piece:
                waiting.discard(master)
    code = process.wait(timeout=60)
    for master in masters:
        os.close(master)
    return code, *(texts[master].decode().replace("\r\n", "\n") for master in masters)


def commands():
    """Every command by name."""
    from flipper.cli import COMMANDS, cli

    context = click.Context(cli, info_name="flipper")
    return {name: cli.get_command(context, name) for name in COMMANDS}


def is_one_error(text):
    """One or two lines that say what is wrong, and no traceback."""
    lines = text.splitlines()
    return len(lines) in (1, 2) and lines[0].startswith("flipper: error: ") and "Traceback" not in text
