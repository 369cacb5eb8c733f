"""Under torchrun: the ranks that it starts do what flipper's own would, and one of them speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from series import spec

from flipper.training.run import train


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`flipper train` on two of torchrun's ranks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "flipper", "train", "digits-cnn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=240)


def test_two_ranks_of_torchrun_share_a_seed_and_print_one_record_with_the_digests_of_flippers_own_launch(
    tmp_path: Path,
) -> None:
    """Rank 0 alone draws the seed, says what it did, and writes checkpoints and metrics."""
    options = ["--parallel", "ddp:2", "--steps", "3", "--save", "run", "--metrics", "m.jsonl"]
    done = torchrun(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    mine = [line for line in done.stderr.splitlines() if line.startswith(("seed ", "wrote "))]
    assert mine == [f"seed {record['seed']}", "wrote run/step-000003.safetensors"]
    own = train(spec("digits-cnn", "ddp:2", steps=3, seed=record["seed"]))
    assert (record["state_digest"], record["resume_digest"]) == (own.state_digest, own.resume_digest)
    assert (record["loss"], record["layout"], record["files"]) == (own.loss, "ddp:2", ["run/step-000003.safetensors"])
    events = [json.loads(line)["event"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert events == ["start", "step", "step", "step", "eval", "saved", "end"]
    resumed = train(spec("digits-cnn", "ddp:2", steps=3, resume=tmp_path / "run"))
    assert resumed.resume_digest == record["resume_digest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallel", "ddp:2+pipeline:2"], "ddp:2+pipeline:2 takes 2 x 2 = 4 ranks, torchrun has started 2"),
        (["--control"], "--control starts fresh ranks three times: run it without torchrun"),
    ],
)
def test_what_does_not_fit_torchruns_ranks_is_one_clear_line(tmp_path: Path, options: list[str], message: str) -> None:
    done = torchrun(tmp_path, "--steps", "1", "--seed", "1", *options)
    assert done.returncode != 0
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if "flipper: error: " in line]
    assert said
    assert all(line.endswith(f"flipper: error: {message}") for line in said)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs one GPU a rank; fewer than two here")
def test_two_gpus_train_under_nccl(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--parallel", "ddp:2", "--steps", "3", "--seed", "3", "--device", "cuda")
    own = train(spec("digits-cnn", "ddp:2", steps=3, device="cuda"))
    assert json.loads(done.stdout)["resume_digest"] == own.resume_digest
