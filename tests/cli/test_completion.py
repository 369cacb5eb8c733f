"""`flipper completion`: the shells complete commands, options and their values."""

import subprocess
import sys

import pytest
from cli_tools import ENVIRONMENT, flipper, here

from flipper.cli import COMMANDS


def completed(*words):
    """What the bash script gets for these words, the last of which is being typed."""
    typed = {"COMP_WORDS": "flipper " + " ".join(words), "COMP_CWORD": str(len(words))}
    done = flipper(_FLIPPER_COMPLETE="bash_complete", **typed)
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_are_completed():
    assert completed("ins") == ["inspect"]
    assert completed("in") == ["inspect", "inject"]
    assert completed("") == list(COMMANDS)


def test_options_and_their_values_are_completed():
    assert completed("inspect", "--la") == ["--layer"]
    assert completed("inject", "x", "--direction", "") == ["0to1", "1to0"]
    assert completed("convert", "x", "--to", "p") == ["pytorch"]
    assert completed("completion", "") == ["bash", "zsh", "fish"]


def test_paths_are_left_to_the_shell():
    done = flipper(COMP_WORDS="flipper inspect a", COMP_CWORD="2", _FLIPPER_COMPLETE="bash_complete")
    assert done.stdout == "file,a\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_calls_flipper_back(shell):
    code, out, err = here("completion", shell)
    assert (code, err) == (0, "")
    assert f"_FLIPPER_COMPLETE={shell}_complete" in out


def test_bash_completes_with_the_script_sourced(tmp_path):
    (tmp_path / "bin").mkdir()
    starter = tmp_path / "bin/flipper"
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} -m flipper "$@"\n')
    starter.chmod(0o755)
    (tmp_path / "script").write_text(here("completion", "bash")[1])
    typed = (
        f"source {tmp_path / 'script'}\n"
        "complete -p flipper\n"
        "COMP_WORDS=(flipper ins) COMP_CWORD=1\n"
        "_flipper_completion flipper ins flipper\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    environment = ENVIRONMENT | {"PATH": f"{tmp_path / 'bin'}:{ENVIRONMENT['PATH']}"}
    done = subprocess.run(["bash", "-c", typed], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "inspect"
    assert done.stderr == ""
