"""Help, its examples, the frozen set of options, and what importing the command line costs."""

import json
import os
import re
import shutil
import subprocess
import sys

import click
import pytest
from cli_tools import ENVIRONMENT, MLP, ROOT, SAMPLES, commands, flipper, here

from flipper.cli import COMMANDS

OUTPUT = "--format -q --quiet -v --verbose --traceback"
SELECTION = "--layer --exclude --role --dtype --bits"
DRAWING = (
    "--count --ber --fraction --fit --hours --spread --weight --field-weight --effect --burst --finite --max-abs "
    "--direction --seed"
)
OPTIONS = {
    "inspect": f"{SELECTION} --stats {OUTPUT}",
    "inject": f"-o --output --in-place {SELECTION} {DRAWING} --plan --dry-run --force --manifest --keep-checksums "
    f"--sha256 --no-provenance --sync {OUTPUT}",
    "diff": f"--summary {OUTPUT}",
    "verify": f"--manifest --source {OUTPUT}",
    "undo": f"--manifest {OUTPUT}",
    "replay": "-o --output --in-place --rename --force --manifest-out --keep-checksums --sha256 --no-provenance "
    + OUTPUT,
    "convert": f"-o --output --to --drop-unsupported --force {OUTPUT}",
    "size": f"--population --margin --confidence --strata --proportion --trials {OUTPUT}",
    "simulate": "--workers --steps --recovery --mtbf --sweep-mtbf --repeat --draws --report --shape --trace --costs "
    "--calibrate --mode --batch-size --save-every --min-ranks --world-batch --world-rate --lost-share --resume "
    f"--data-dir --seed {OUTPUT}",
    "completion": "-q --quiet -v --verbose --traceback",
}
"""Renaming one of these breaks scripts: it is a decision, and this is where it is written down."""

ARGUMENTS = {
    "inspect": ["ckpt"], "inject": ["ckpt"], "diff": ["a", "b"], "verify": ["file"], "undo": ["file"],
    "replay": ["manifest", "ckpt"], "convert": ["ckpt"], "size": [], "simulate": ["recipe"], "completion": ["shell"],
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_that_were_decided(name):
    options = [option for option in commands()[name].params if isinstance(option, click.Option)]
    assert sorted(word for option in options for word in option.opts) == sorted(OPTIONS[name].split())
    assert not any(option.secondary_opts for option in options)
    assert [p.name for p in commands()[name].params if isinstance(p, click.Argument)] == ARGUMENTS[name]


def test_every_other_command_has_its_options_frozen():
    """Those of train, of campaign and of study are with their tests."""
    assert {*OPTIONS, "train", "campaign", "study"} == set(COMMANDS)


def test_every_option_has_help_or_a_default_that_tells():
    for name, command in commands().items():
        for option in command.params:
            if isinstance(option, click.Option) and name != "train":
                assert option.help or option.show_default, f"{name} {option.opts}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_is_that_of_the_table(name):
    assert commands()[name].short_help == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_h_and_help_are_the_same(name):
    assert here(name, "-h") == here(name, "--help")
    assert here(name, "--help")[0] == 0


def test_help_lists_all_commands_and_imports_only_click():
    code = (
        "import sys\nbefore = set(sys.modules)\nimport flipper.cli\n"
        "try: flipper.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)), "
        "sorted(m for m in sys.modules if m.startswith('flipper')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    *text, imported = done.stdout.splitlines()
    assert imported == "['click', 'flipper'] ['flipper', 'flipper.cli']"
    for name in COMMANDS:
        assert any(line.startswith(f"  {name} ") for line in text)


def test_importing_the_command_line_or_the_library_imports_nothing_heavy():
    for module in ("flipper", "flipper.cli", "flipper.cli.inject", "flipper.cli.inspect", "flipper.cli.train"):
        assert not heavy(f"import {module}") & {"numpy", "h5py", "torch", "rich", "ml_dtypes", "safetensors"}


COMMAND_LINES = {
    "inspect": ["inspect", "{s}/digits-mlp.pt", "--stats"],
    "inspect hdf5": ["inspect", "{s}/digits-mlp.h5"],
    "inject": ["inject", "{s}/digits-mlp.pt", "-o", "{t}/a", "--seed", "1", "--finite"],
    "inject hdf5": ["inject", "{s}/digits-mlp.h5", "-o", "{t}/b", "--seed", "1"],
    "inject dcp": ["inject", "{s}/digits-cnn-dcp", "-o", "{t}/c", "--seed", "1"],
    "diff": ["diff", "{s}/digits-mlp.pt", "{s}/digits-mlp.safetensors"],
    "undo": ["undo", "{t}/u"],
    "verify": ["verify", "{s}/digits-mlp.pt"],
    "replay": ["replay", "{t}/u.flipper.json", "{s}/digits-mlp.pt", "-o", "{t}/d"],
    "convert": ["convert", "{s}/digits-mlp.pt", "-o", "{t}/e", "--to", "pytorch"],
    "size": ["size", "--population", "100"],
    "study mesh": ["study", "mesh", "--shape", "4x4", "--failed", "0,1"],
}


@pytest.mark.parametrize("arguments", COMMAND_LINES.values(), ids=COMMAND_LINES)
def test_no_command_but_train_imports_torch(arguments, tmp_path):
    here("inject", MLP, "-o", tmp_path / "u", "--seed", "1")
    words = [word.format(s=SAMPLES, t=tmp_path) for word in arguments]
    unwanted = {"torch", "rich", "scipy", "sklearn", "matplotlib"}
    unwanted |= set() if "hdf5" in str(words) or ".h5" in str(words) else {"h5py"}
    run = f"import flipper.cli\ntry: flipper.cli.main({words!r})\nexcept SystemExit as end: assert not end.code"
    assert not heavy(run) & unwanted


def heavy(code):
    """The packages that a piece of code brings in, in a process of its own."""
    tail = "\nimport sys, json\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def examples(name):
    """The lines of the example in a command's help."""
    text = here(name, "--help")[1]
    block = re.search(r"^  Example.*:?.*\n((?:    .*\n)+)", text, re.MULTILINE)
    assert block, f"flipper {name} --help has no example"
    return [line.strip() for line in block[1].splitlines()]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("train", "campaign", "study")])
def test_the_example_works_as_typed(name, tmp_path):
    """From a folder that has sample_checkpoints/, as the repository's root has."""
    (tmp_path / "sample_checkpoints").symlink_to(SAMPLES)
    (tmp_path / "home/.local/share/bash-completion/completions").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    starter = tmp_path / "bin/flipper"
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} -m flipper "$@"\n')
    starter.chmod(0o755)
    script = "\n".join(examples(name))
    assert script.count("/tmp/") == len(re.findall(r"/tmp/[\w.]+", script))
    script = script.replace("/tmp/", f"{tmp_path}/")
    environment = ENVIRONMENT | {"HOME": str(tmp_path / "home"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr


def test_the_example_of_train_names_a_sample():
    """Training is run by its own tests."""
    line = examples("train")[0]
    assert line.startswith("flipper train ")
    for word in line.split():
        if word.startswith("sample_checkpoints/"):
            assert (ROOT / word).exists()


def test_version_is_that_of_the_package():
    import flipper as package

    assert here("--version") == (0, f"flipper, version {package.__version__}\n", "")


def test_python_m_flipper_is_the_command():
    installed = shutil.which("flipper", path=os.path.dirname(sys.executable))
    if installed is None:
        pytest.skip("not installed as a command")
    done = subprocess.run([installed, "--help"], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == flipper("--help").stdout
