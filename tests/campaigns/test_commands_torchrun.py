"""The example of the user's own training: plain PyTorch under torchrun, data- and model-parallel, as users run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flipper.campaigns.folder import open_campaign
from flipper.campaigns.results import load_results, rows

EXAMPLE = Path(__file__).parents[2] / "scripts" / "campaigns"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

pytestmark = pytest.mark.slow


def done(words: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [str(word) for word in words], cwd=folder, capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert run.returncode == 0, run.stderr
    return run


def tensors(value: Any, name: str = "") -> dict[str, Any]:
    """All that a saved file holds, by its place in it."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, below in pairs for k, v in tensors(below, f"{name}.{key}").items()}
    return {name: value}


def loaded(path: Path) -> dict[str, Any]:
    return tensors(torch.load(path, weights_only=True))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, and the checkpoint that it begins with."""
    path = tmp_path_factory.mktemp("example")
    for name in ("train_digits.py", "own-training.toml"):
        shutil.copy(EXAMPLE / name, path)
    done([sys.executable, "train_digits.py", "--epochs", "2", "--save", "digits.pt"], path)
    return path


def test_the_script_resumes_exactly(folder: Path) -> None:
    script = [sys.executable, "train_digits.py", "--epochs", "3", "--save"]
    done([*script, "whole.pt"], folder)
    done([*script, "resumed.pt", "--resume", "digits.pt"], folder)
    assert equal(loaded(folder / "whole.pt"), loaded(folder / "resumed.pt"))
    assert not equal(loaded(folder / "digits.pt"), loaded(folder / "resumed.pt"))


def test_both_layouts_are_struck_alike_and_judged_by_golden_runs_that_are_the_scripts_own(folder: Path) -> None:
    options = {"axes.bits": "exponent-msb,0-3", "axes.count": "1", "campaign.trials": "1", "campaign.tolerance": "0.05",
               "campaign.training_seeds": "[1]"}  # fmt: skip
    changes = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    words = [sys.executable, "-m", "flipper", "campaign", "run", "own-training.toml", "--keep", *changes]
    record = json.loads(done([*words, "--format", "json"], folder).stdout)
    assert (record["cells"], record["trials"]) == (4, 4)
    campaign = open_campaign(folder / "own-training")
    assert not (campaign.folder.path / "logs").exists() or not list((campaign.folder.path / "logs").iterdir())
    results = load_results(campaign, detail=True)
    found = {}
    for each, row in zip(results.trials, rows(results), strict=True):
        run = each.run
        found[run.parallel, each.cell.axes["bits"]] = run, row["outcome"]
        original = loaded(folder / "digits.pt")
        altered = loaded(campaign.folder.trial(run.cell, run.trial) / "checkpoint" / "digits.pt")
        changed = [key for key in original if not equal({key: original[key]}, {key: altered[key]})]
        assert changed == [f".{run.faults[0][0]}"]
        (flat,) = (original[changed[0]].view(torch.int32) != altered[changed[0]].view(torch.int32)).flatten().nonzero()
        assert flat.item() == run.faults[0][1]
    for bits in ("exponent-msb", "0-3"):
        assert found["ddp", bits][0].faults == found["pipeline", bits][0].faults
    for layout in ("ddp", "pipeline"):
        assert found[layout, "exponent-msb"][1] in ("degraded", "non-finite", "extreme")
        assert found[layout, "0-3"][1] in ("masked", "identical")
        resume = ["--parallel", layout, "--resume", "digits.pt", "--epochs", "4", "--seed", "1"]
        done([*TORCHRUN, "train_digits.py", *resume, "--save", "by-hand.pt", "--metrics", "by-hand.jsonl"], folder)
        golden = next(golden for golden in results.goldens.values() if golden.parallel == layout)
        output = next((campaign.folder.path / "golden").glob(f"*/{layout}-seed1/output/digits.pt"))
        assert equal(loaded(output), loaded(folder / "by-hand.pt"))
        lines = [json.loads(line) for line in (folder / "by-hand.jsonl").read_text().splitlines()]
        assert [(s, loss) for s, loss, _ in golden.steps] == [
            (line["iteration"], line["train_loss"]) for line in lines if "train_loss" in line
        ]
        assert [(s, metric) for s, _, metric in golden.evals] == [
            (line["iteration"], line["val_acc"]) for line in lines if "val_acc" in line
        ]
        assert golden.first_step == 60
