"""Every block of the README runs, and prints what it says; `...` stands for lines that may be anything."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
PYTHON = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if block.startswith("import")]


def commands_of(block: str) -> list[tuple[str, str]]:
    """(command, output) of a console block: `$ ` begins a command, `> ` goes on with it."""
    found: list[list[str]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append([line[2:], ""])
        elif line.startswith("> ") and not found[-1][1]:
            found[-1][0] += "\n" + line[2:]
        else:
            found[-1][1] += line + "\n"
    return [(command, output) for command, output in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the samples, shared by all blocks in their order."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "sample_checkpoints", folder / "sample_checkpoints")
    for name, content in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README, re.DOTALL):
        (folder / name).write_text(content)
    return folder


def run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": path}, check=False,
    )  # fmt: skip
    assert "Traceback" not in ended.stdout
    return ended.stdout


@pytest.mark.parametrize("block", CONSOLE, ids=[block.splitlines()[0][2:40] for block in CONSOLE])
def test_console_block_prints_what_it_says(block: str, folder: Path) -> None:
    for command, expected in commands_of(block):
        seen = run(command, folder)
        if expected.strip() == "...":
            assert seen.strip(), command
            assert "error" not in seen, seen
        else:
            # stdout and stderr meet in one pipe here, so that only the lines count and not their order.
            assert sorted(seen.splitlines()) == sorted(expected.splitlines()), command


@pytest.mark.parametrize("block", PYTHON)
def test_python_block_runs(block: str, folder: Path) -> None:
    seen = subprocess.run([sys.executable, "-c", block], cwd=folder, text=True, capture_output=True, check=True)
    assert len(seen.stdout.splitlines()) == 10


def test_every_command_and_package_stands_in_the_readme() -> None:
    from flipper.cli import COMMANDS

    missing = [name for name in COMMANDS if not re.search(rf"`?flipper {name}\b", README)]
    assert missing == []
    for package in sorted((ROOT / "flipper").glob("*/__init__.py")):
        assert f"`flipper/{package.parent.name}/`" in README
