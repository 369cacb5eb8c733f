"""The library as INTERFACE section 6 shows it: the public names, what they return, what importing costs."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flipper

PUBLIC = {
    "Checkpoint", "CheckpointError", "FaultModel", "FaultPlan", "FlipperError", "Manifest", "convert", "draw", "inject",
    "open", "read_manifest", "strike", "undo", "verify",
}  # fmt: skip
"""Renaming one of these breaks notebooks: it is a decision, and this is where it is written down."""


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = torch.nn.Conv2d(1, 2, 3)
        self.fc = torch.nn.Linear(8, 4)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(Net().state_dict(), path)
    return path


def bits(state):
    return {name: tensor.view(torch.int32).flatten().tolist() for name, tensor in state.items()}


def test_the_public_names():
    assert set(flipper.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(flipper, name).__doc__, name
    assert set(dir(flipper)) >= PUBLIC
    assert not hasattr(flipper, "nope")


def test_a_star_import_gives_them():
    names = {}
    exec("from flipper import *", names)
    assert set(names) >= PUBLIC


def test_importing_it_loads_nothing_heavy():
    code = "import flipper, sys; print(sorted({'numpy', 'h5py', 'torch', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_example_of_the_contract(model, tmp_path):
    ckpt = flipper.open(model)
    fault_model = flipper.FaultModel(bits="exponent", layers=["fc*"], count=10)
    plan = flipper.draw(ckpt, fault_model, seed=7)
    bad = tmp_path / "bad.safetensors"
    manifest = flipper.inject(str(model), str(bad), plan)

    assert isinstance(ckpt, flipper.Checkpoint)
    assert isinstance(plan, flipper.FaultPlan)
    assert isinstance(manifest, flipper.Manifest)
    assert len(plan) == len(list(plan)) == 10
    live = Net().state_dict()
    assert bits(live) == bits(load_file(model))
    flipper.strike(live, plan)
    assert bits(live) == bits(load_file(bad)) != bits(load_file(model))
    assert flipper.verify(bad, manifest.path, model).record()["complete"] is True
    flipper.undo(bad)
    assert bad.read_bytes() == model.read_bytes()


def test_opening_reads_no_tensor_data(model):
    """A file that ends where its data should begin can be described, not read."""
    size = int.from_bytes(model.read_bytes()[:8], "little") + 8
    data = model.read_bytes()
    with flipper.open(model) as ckpt:
        assert [tensor.name for tensor in ckpt.tensors] == sorted(load_file(model))
        assert ckpt.size == len(data) > size


def test_a_fault_says_what_strikes_what(model):
    for fault in flipper.draw(flipper.open(model), flipper.FaultModel(bits="sign", count=5), seed=1):
        assert (fault.op, fault.mask, fault.value, fault.bits) == ("flip", 1 << 31, None, (31,))
        assert 0 <= fault.flat < load_file(model)[fault.tensor].numel()


def test_the_same_seed_draws_the_same_and_the_command_line_too(model, tmp_path):
    from click.testing import CliRunner

    from flipper.cli import cli

    options = flipper.FaultModel(bits="mantissa", layers=["conv1"], count=6)
    one, other = (flipper.draw(flipper.open(model), options, seed=2**64 - 1) for _ in range(2))
    assert list(one) == list(other)
    flipper.inject(model, tmp_path / "library", one)
    words = ["--bits", "mantissa", "--layer", "conv1", "--count", "6", "--seed", str(2**64 - 1)]
    CliRunner().invoke(cli, ["inject", str(model), "-o", str(tmp_path / "command"), *words], catch_exceptions=False)
    assert (tmp_path / "library").read_bytes() == (tmp_path / "command").read_bytes()


def test_a_manifest_is_read_back_as_it_was_returned(model, tmp_path):
    plan = flipper.draw(flipper.open(model), flipper.FaultModel(count=3), seed=1)
    made = flipper.inject(model, tmp_path / "bad", plan)
    assert flipper.read_manifest(str(made.path)).faults == made.faults
    read = flipper.read_manifest(made.path)
    assert read.faults == made.faults == json.loads(made.path.read_text())["faults"]
    assert read.summary() == made.summary()


def test_plans_and_manifests_are_compared_by_what_they_hold(model, tmp_path):
    ckpt = flipper.open(model)
    plan, again, other = (flipper.draw(ckpt, flipper.FaultModel(count=3), seed=seed) for seed in (1, 1, 2))
    assert plan == again
    assert plan != other
    assert plan != list(plan)
    assert flipper.read_manifest(str(flipper.inject(ckpt, tmp_path / "a", plan).path)) == flipper.read_manifest(
        tmp_path / "a.flipper.json"
    )


@pytest.mark.parametrize("value", [5, None, [5], ["a", None], [b"a"], 1.5])
@pytest.mark.parametrize("name", ["layers", "exclude", "roles", "dtypes"])
def test_patterns_and_names_are_text(name, value):
    with pytest.raises(flipper.FlipperError, match=f"{name}: .* is neither a text nor several"):
        flipper.FaultModel(**{name: value})


def test_patterns_may_come_from_any_iterable():
    patterns = ("conv1", "fc")
    assert flipper.FaultModel(layers=iter(patterns)) == flipper.FaultModel(layers=list(patterns))
    assert flipper.FaultModel(layers="fc").layers == ("fc",)


def test_a_model_is_a_value():
    assert flipper.FaultModel(count=3) == flipper.FaultModel(count=3)
    assert dataclasses.replace(flipper.FaultModel(count=3), count=4).count == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        flipper.FaultModel().count = 2


def test_convert_keeps_what_was_there(model, tmp_path):
    with flipper.open(model) as ckpt:
        flipper.convert(ckpt, tmp_path / "a.pt", "pytorch")
    assert bits(torch.load(tmp_path / "a.pt", weights_only=True)) == bits(load_file(model))


@pytest.mark.parametrize(("call", "kind"), [
    (lambda folder: flipper.open(folder / "nowhere"), ValueError),
    (lambda folder: flipper.open(__file__), flipper.CheckpointError),
    (lambda folder: flipper.open(__file__), ValueError),
    (lambda folder: flipper.FaultModel(count=-1), ValueError),
    (lambda folder: flipper.FaultModel(count=1, ber=0.5), ValueError),
    (lambda folder: flipper.FaultModel(bits="nope"), ValueError),
    (lambda folder: flipper.undo(folder / "model.safetensors"), flipper.FlipperError),
    (lambda folder: flipper.read_manifest(Path(__file__)), flipper.FlipperError),
    (lambda folder: copy_to(folder, "no/where"), OSError),
    (lambda folder: copy_to(folder, "model.safetensors"), ValueError),
    (lambda folder: draw_too_many(folder), flipper.FlipperError),
])  # fmt: skip
def test_errors_are_of_one_family_and_of_the_kind_people_catch(model, call, kind):
    with pytest.raises(kind) as raised:
        call(model.parent)
    assert isinstance(raised.value, flipper.FlipperError)
    assert "\n" not in str(raised.value)


def copy_to(folder, name):
    source = folder / "model.safetensors"
    flipper.inject(source, folder / name, flipper.draw(flipper.open(source), flipper.FaultModel(count=0), seed=1))


def draw_too_many(folder):
    return flipper.draw(flipper.open(folder / "model.safetensors"), flipper.FaultModel(count=10**6), seed=1)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1"])
def test_seeds_are_whole_numbers_below_2_to_the_64(model, seed):
    with pytest.raises((flipper.FlipperError, TypeError)):
        flipper.draw(flipper.open(model), flipper.FaultModel(), seed=seed)


def test_without_a_seed_one_is_drawn_and_kept(model):
    plans = [flipper.draw(flipper.open(model), flipper.FaultModel()) for _ in range(2)]
    assert plans[0].seed != plans[1].seed
    assert list(flipper.draw(flipper.open(model), flipper.FaultModel(), plans[0].seed)) == list(plans[0])


def test_live_tensors_that_do_not_fit_are_refused_untouched(model):
    plan = flipper.draw(flipper.open(model), flipper.FaultModel(count=20), seed=1)
    live = Net().state_dict()
    del live["fc.weight"]
    before = bits(live)
    with pytest.raises(flipper.FlipperError):
        flipper.strike(live, plan)
    assert bits(live) == before
