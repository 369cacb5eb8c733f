"""The campaign file in the page asks for the same campaign; the machines are those of the golden runs."""

import json
from pathlib import Path

import pytest
from made_up_campaign import made_up

from flipper.campaigns.results import load_results
from flipper.campaigns.spec import read_spec
from flipper.report.provenance import machines, spec_text

SPECS = {
    "axes": """
[campaign]
name = "a"
seed = 9
training_seeds = [4, 5]
recipe = "digits-cnn"
inject_epoch = 1
epochs = 2
trials = 8
tolerance = 0.01
contrast = ["ddp:2", "pipeline:2"]
detect = ["nonfinite-loss"]
fit = 70.5
[axes]
parallel = ["ddp:2", "pipeline:2"]
layer = ["conv1", ["conv1", "fc"], "re:^[a-z]+\\\\.\\"x\\"$"]
count = [1, 10]
spread = "weighted"
weight = {"conv*" = 2, "fc" = 1.5}
""",
    "slices": """
[campaign]
name = "b"
recipe = "digits-mlp"
inject_step = 3
steps = 9
margin = 0.1
confidence = 0.9
metric = "loss"
better = "higher"
[axes]
parallel = "ddp:2"
[[slices]]
bits = ["sign", "exponent"]
[[slices]]
bits = "mantissa"
reach = "one"
trials = 7
""",
    "census": """
[campaign]
name = "c"
recipe = "digits-mlp"
inject_epoch = 1
epochs = 2
trials = "all"
null_trials = 2
[axes]
parallel = "single"
bits = ["30", 31]
""",
    "commands": """
[campaign]
name = "d"
trials = 3
[axes]
checkpoint = "mine.pt"
bits = "exponent"
[commands]
ddp = "python train.py --resume {checkpoint} --metrics {metrics} --name 'a \\"b\\"'"
"my own" = "python other.py {checkpoint} {metrics}"
[metrics]
step = "iteration"
metric = "val_acc"
""",
}


@pytest.mark.parametrize("name", SPECS)
def test_the_campaign_file_asks_for_the_same_campaign(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_bytes(b"")
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text(SPECS[name], "utf-8")
    spec = read_spec(first)
    second.write_text(spec_text(spec), "utf-8")
    assert read_spec(second) == spec


def test_machines_are_told_as_far_as_they_are_known(tmp_path: Path) -> None:
    results = load_results(made_up(tmp_path))
    assert machines(results) == [{"fingerprint": "f0"}]
    home = results.campaign.folder.golden("f0", "ddp:2", 1)
    home.mkdir(parents=True)
    (home / "golden.json").write_text(json.dumps({"machine": {"cpu": "Z80", "threads": "1", "gpu": ""}}))
    assert machines(results) == [{"fingerprint": "f0", "cpu": "Z80", "threads": "1"}]
    (home / "golden.json").write_text("{")
    assert machines(results) == [{"fingerprint": "f0"}]
