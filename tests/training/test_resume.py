"""Checkpoints of a run: what is in them, that every layout goes on from them, altered or not, and what is refused."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
import torch
from safetensors.numpy import load_file, save_file

from flipper.errors import CheckpointError, MismatchError, OutputError, TrainingError, UsageError
from flipper.training import seeds
from flipper.training.run import TrainResult, train
from flipper.training.spec import SUFFIXES, Event, Parallel, TrainSpec, checkpoint_path

STEPS = 24  # past the first epoch's end, 22 steps
LAYOUTS = ("single", "ddp:2", "pipeline:2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainResult]:
    """One short training, saved in each format."""
    folder = tmp_path_factory.mktemp("run")
    return {
        name: train(TrainSpec("digits-cnn", steps=STEPS, seed=2**64 - 5, save=folder / name, checkpoint_format=name))
        for name in SUFFIXES
    }


def saved(run: dict[str, TrainResult], checkpoint_format: str) -> Path:
    return Path(run[checkpoint_format].files[-1])


def resume(path: Path, layout: str = "single", steps: int = STEPS, **options: object) -> TrainResult:
    return train(TrainSpec("digits-cnn", Parallel.parse(layout), steps=steps, resume=path, **options))


def test_the_three_formats_hold_the_same_tensors_under_the_same_names(run: dict[str, TrainResult]) -> None:
    """Read by torch, safetensors and h5py themselves."""
    flat = load_file(saved(run, "safetensors"))
    for name, array in flat.items():
        if name.startswith("model."):
            assert torch.load(saved(run, "pytorch"))["model"][name[6:]].numpy().tobytes() == array.tobytes()
    with h5py.File(saved(run, "hdf5")) as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        names = [name for name in names if not name.startswith("flipper_")]  # the record of the structure
        assert sorted(name.replace("/", ".") for name in names) == sorted(flat)
        for name in names:
            array = flat[name.replace("/", ".")]
            assert (file[name].dtype, file[name].shape) == (array.dtype, array.shape)
            assert file[name][()].tobytes() == array.tobytes()
    assert {
        "optimizer.conv1.weight.exp_avg_sq",
        "progress.step",
        "rng.rank0.cpu",
        "model.bn1.running_var",
    } <= set(flat)


def test_the_state_digest_is_what_the_interface_says(run: dict[str, TrainResult]) -> None:
    """sha256 over name, dtype, shape and bytes of model and optimizer tensors in name order."""
    digest = hashlib.sha256()
    for name, array in sorted(load_file(saved(run, "safetensors")).items()):
        if name.startswith(("model.", "optimizer.")):
            digest.update(f"{name}\0{array.dtype}{list(array.shape)}\0".encode() + array.tobytes())
    assert {result.state_digest for result in run.values()} == {digest.hexdigest()}


@pytest.mark.parametrize("checkpoint_format", SUFFIXES)
def test_a_state_saved_again_has_the_same_bytes(
    run: dict[str, TrainResult], tmp_path: Path, checkpoint_format: str
) -> None:
    """No clock, path or random name gets into a checkpoint (more than a second has passed since the first)."""
    first = saved(run, checkpoint_format)
    time.sleep(max(0.0, first.stat().st_mtime + 1.1 - time.time()))
    resume(first, save=tmp_path, checkpoint_format=checkpoint_format)
    assert content(tmp_path / first.name) == content(first)


def content(path: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


def test_pytorch_checkpoints_hold_a_plain_state_dict(run: dict[str, TrainResult]) -> None:
    model = torch.nn.Sequential()
    for name, child in [("conv1", torch.nn.Conv2d(1, 16, 3)), ("bn1", torch.nn.BatchNorm2d(16))]:
        model.add_module(name, child)
    answer = model.load_state_dict(torch.load(saved(run, "pytorch"))["model"], strict=False)
    assert not answer.missing_keys


def test_last_names_the_newest_and_a_save_folder_can_be_resumed(run: dict[str, TrainResult]) -> None:
    folder = saved(run, "hdf5").parent
    assert (folder / "last").read_text() == "step-000024.h5\n"
    assert resume(folder).first_step == STEPS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpoint_format", SUFFIXES)
def test_every_layout_holds_the_same_state_right_after_loading(
    run: dict[str, TrainResult], checkpoint_format: str, layout: str
) -> None:
    result = resume(saved(run, checkpoint_format), layout)
    clean = run["safetensors"]
    assert (result.first_step, result.steps, result.seed) == (STEPS, STEPS, 2**64 - 5)
    assert (result.state_digest, result.loss, result.accuracy) == (
        clean.state_digest,
        clean.loss,
        clean.accuracy,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_altered_checkpoint_is_taken_as_it_is(run: dict[str, TrainResult], tmp_path: Path, layout: str) -> None:
    """A huge weight, and a NaN: training goes on from both and reports what comes of it, in strict JSON."""
    for value in (numpy.float32(2.0**120), numpy.float32("nan")):
        arrays = load_file(saved(run, "safetensors"))
        arrays["model.fc.weight"][3, 17] = value
        path = tmp_path / f"{value}.safetensors"
        save_file(arrays, path)
        untouched = resume(path, layout)
        assert untouched.state_digest != run["safetensors"].state_digest
        events: list[Event] = []
        result = train(TrainSpec("digits-cnn", Parallel.parse(layout), steps=STEPS + 2, resume=path), events.append)
        losses = [event["loss"] for event in events if event["event"] == "step"]
        assert len(losses) == 2
        assert result.steps == STEPS + 2
        assert all(math.isnan(loss) if math.isnan(value) else loss > 1e6 or math.isnan(loss) for loss in losses)


def test_resuming_with_another_seed_changes_data_order_and_dropout(run: dict[str, TrainResult]) -> None:
    digests = {resume(saved(run, "pytorch"), steps=STEPS + 1, seed=seed).state_digest for seed in (None, 2**64 - 5, 4)}
    assert len(digests) == 2


def test_epochs_and_steps_count_from_the_beginning(run: dict[str, TrainResult]) -> None:
    result = train(TrainSpec("digits-cnn", epochs=2, resume=saved(run, "hdf5")))
    assert (result.first_step, result.steps) == (STEPS, 44)
    with pytest.raises(UsageError, match=r"is at step 24 already"):
        resume(saved(run, "hdf5"), steps=10)


def test_saving_every_n_steps_writes_each_and_refuses_to_overwrite(run: dict[str, TrainResult], tmp_path: Path) -> None:
    spec = TrainSpec("digits-mlp", Parallel.parse("ddp:2"), steps=5, seed=1, save=tmp_path / "a" / "b", save_every=2)
    result = train(spec)
    assert [Path(name).name for name in result.files] == [f"step-00000{step}.safetensors" for step in (2, 4, 5)]
    before = {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()}
    with pytest.raises(OutputError, match=r"step-00000[245]\.safetensors exists"):
        train(spec)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()} == before


@pytest.mark.parametrize("checkpoint_format", [name for name in SUFFIXES if name != "dcp"])
def test_a_damaged_checkpoint_is_one_line_with_a_reason(
    run: dict[str, TrainResult], tmp_path: Path, checkpoint_format: str
) -> None:
    content = saved(run, checkpoint_format).read_bytes()
    path = tmp_path / "damaged"
    for damaged in (content[: len(content) // 2], b"", b"GIF89a" * 50, content[:20]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            resume(path)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_recipe_is_refused_with_what_is_missing_and_unexpected(
    run: dict[str, TrainResult], tmp_path: Path
) -> None:
    named = r"digits-mlp: missing: model\.fc1\.bias, .*; unexpected: model\.bn1\.bias, .* and \d+ more"
    with pytest.raises(MismatchError, match=named):
        train(TrainSpec("digits-mlp", Parallel.parse("ddp:2"), steps=30, resume=saved(run, "pytorch")))
    for name, array, message in [
        ("model.fc.bias", numpy.zeros(11, "f4"), r"model\.fc\.bias is float32\[11\], not float32\[10\]"),
        ("model.fc.bias", numpy.zeros(10, "f8"), r"model\.fc\.bias is float64\[10\], not float32\[10\]"),
        ("model.extra", numpy.zeros(1, "f4"), r"unexpected: model\.extra"),
        ("optimizer.fc.bias.exp_avg", numpy.zeros(3, "f4"), r"optimizer\.fc\.bias\.exp_avg"),
        ("progress.batch", numpy.array(22, "i8"), r"batch 22 is no place"),
        ("progress.step", numpy.array(1.0, "f4"), r"progress\.step is not an int64 scalar"),
    ]:
        save_file({**load_file(saved(run, "safetensors")), name: array}, tmp_path / "other.safetensors")
        with pytest.raises(MismatchError, match=message):
            resume(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    "generator", [numpy.zeros(100, "u1"), numpy.zeros(0, "u1"), numpy.zeros(5056, "f4"), numpy.full(5056, 255, "u1")]
)
def test_a_generators_state_that_torch_does_not_take_is_named(
    run: dict[str, TrainResult], tmp_path: Path, generator: numpy.ndarray[Any, Any]
) -> None:
    """Only where it is used: another layout has generators of its own."""
    path = tmp_path / "other.safetensors"
    save_file({**load_file(saved(run, "safetensors")), "rng.rank0.cpu": generator}, path)
    with pytest.raises(MismatchError, match=r"^can't resume: rng\.rank0\.cpu is no generator's state: "):
        resume(path)
    assert resume(path, "ddp:2").first_step == STEPS


def test_generators_of_a_cpu_do_not_carry_over_to_a_gpu_whose_own_would_stay_as_they_are(
    run: dict[str, TrainResult],
) -> None:
    state = {name: torch.tensor(array) for name, array in load_file(saved(run, "safetensors")).items()}
    with torch.random.fork_rng():
        before = torch.manual_seed(4).get_state()
        assert not seeds.reinstate(state, 0, "single", torch.device("cuda"))
        assert torch.equal(torch.get_rng_state(), before)
        assert seeds.reinstate(state, 0, "single", torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), state["rng.rank0.cpu"])


def test_a_checkpoint_that_another_run_has_saved_meanwhile_is_never_written_over(tmp_path: Path) -> None:
    """What both began with, an empty folder, holds the other's at the last step."""

    def save_first(event: Event) -> None:
        if event["event"] == "start":
            (tmp_path / "step-000400.safetensors").write_text("the other's")

    with pytest.raises(OutputError, match=r"step-000400\.safetensors exists; choose another --save folder"):
        train(TrainSpec("digits-mlp", steps=400, seed=1, save=tmp_path), save_first)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000400.safetensors"]
    assert (tmp_path / "step-000400.safetensors").read_text() == "the other's"


def test_what_a_struck_step_counter_does_to_adam_is_a_clear_error(run: dict[str, TrainResult], tmp_path: Path) -> None:
    """A step of -1 makes Adam divide by zero: training crashes, flipper does not."""
    arrays = load_file(saved(run, "safetensors"))
    arrays["optimizer.fc.bias.step"][...] = -1
    save_file(arrays, tmp_path / "struck.safetensors")
    with pytest.raises(TrainingError, match=r"^rank 1 of 2: ZeroDivisionError: .* \(in step 25\)$"):
        resume(tmp_path / "struck.safetensors", "pipeline:2", STEPS + 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("ddp", "no layout 'ddp'; known: single, ddp:N, hooks:N"),
        ("ring:2", "no layout 'ring:2'"),
        ("single:2", "no layout"),
        ("ddp:0", "must be 1 to"),
        ("ddp:two", "must be 1 to"),
        ("pipeline:2+ddp:2", "no layout"),
        ("ddp:2+tensor:2", "no layout"),
        ("ddp:2+pipeline:2+tensor:2", "no layout"),
        ("ddp:64+pipeline:64", "64 x 64 = 4096 ranks; at most 1024"),
    ],
)
def test_a_layout_that_is_not_one_is_refused_with_what_is_known(layout: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Parallel.parse(layout)


def test_a_layout_that_the_recipe_cannot_fill_is_refused() -> None:
    with pytest.raises(UsageError, match=r"pipeline:4: digits-cnn has at most 3 stages"):
        train(TrainSpec("digits-cnn", Parallel.parse("pipeline:4"), steps=1, seed=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nccl needs one GPU a rank; none here")
def test_training_on_a_gpu_is_exact_too() -> None:
    results = [train(TrainSpec("digits-cnn", steps=4, seed=1, device="cuda")) for _ in range(2)]
    assert results[0].resume_digest == results[1].resume_digest


def test_the_path_of_a_step_is_as_the_interface_says() -> None:
    assert checkpoint_path(Path("d"), 120, "pytorch") == Path("d/step-000120.pt")
