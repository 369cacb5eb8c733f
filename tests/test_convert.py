"""convert: the same tensors, names, ties, nesting and scalars in all formats, judged by torch, h5py, safetensors."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flipper.checkpoints import open_checkpoint
from flipper.checkpoints.convert import convert
from flipper.errors import CheckpointError, OutputError, UsageError

FORMATS = ("safetensors", "pytorch", "hdf5")


def turn(source, output, to, **options):
    with open_checkpoint(source) as checkpoint:
        return convert(checkpoint, output, to, **options)


def population(path):
    """What a draw depends on, and the elements: names, aliases, dtypes, shapes, bits."""
    with open_checkpoint(path) as checkpoint:
        return [
            (t.name, t.aliases, t.role, t.dtype, t.shape, np.concatenate([*checkpoint.blocks(t), []]).tolist())
            for t in checkpoint.tensors
        ]


def same(one, other) -> bool:
    """Whether two loaded objects are equal, type by type and bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and elements(one) == elements(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(itertools.starmap(same, zip(one, other, strict=True)))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return one == other


def elements(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage())


def plain(node):
    """A loaded object with plain dicts for OrderedDicts, which are no part of what is carried."""
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(plain(item) for item in node)
    return node


class Net(torch.nn.Module):
    """Convolution, BatchNorm, and two tied matrices."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3)
        self.norm = torch.nn.BatchNorm2d(2)
        self.encode = torch.nn.Linear(4, 4, bias=False)
        self.decode = torch.nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(self.norm(self.conv(x)).mean(3)))


def training_state():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), betas=(0.8, 0.99))
    net(torch.randn(3, 1, 6, 6)).square().mean().backward()
    optimizer.step()
    table = torch.arange(12.0).reshape(3, 4)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "loss": float("nan"),
        "best": (float("-inf"), -0.0, 2**80),
        "note": "é\n",
        "rng": torch.get_rng_state(),
        "half": torch.randn(5).to(torch.bfloat16),
        "byte": torch.randn(5).to(torch.float8_e4m3fn),
        "wave": torch.randn(3, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": table.t(),
        "every other": torch.arange(10)[::2],
        "weird/key": {"": torch.ones(1), "a.b": torch.ones(2)},
        "list": [torch.zeros(1), {"x": torch.full((2,), 2.0)}, None],
        "raw": b"\x00\xff",
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "state.pt"
    torch.save(training_state(), path)
    return path


@pytest.mark.parametrize("way", [("hdf5",), ("safetensors",), ("hdf5", "safetensors"), ("safetensors", "hdf5")])
def test_a_training_state_comes_back_equal(tmp_path, source, way):
    here = source
    for number, to in enumerate((*way, "pytorch")):
        turn(here, tmp_path / f"{number}", to)
        here = tmp_path / f"{number}"
    found = torch.load(here, weights_only=True)
    assert same(found, plain(torch.load(source, weights_only=True)))
    net = Net()
    net.load_state_dict(found["model"])
    torch.optim.Adam(net.parameters()).load_state_dict(found["optimizer"])


def test_ties_come_back_tied(tmp_path, source):
    for to in ("hdf5", "safetensors"):
        turn(source, tmp_path / to, to)
        turn(tmp_path / to, tmp_path / f"{to}.pt", "pytorch")
        model = torch.load(tmp_path / f"{to}.pt")["model"]
        assert model["encode.weight"].data_ptr() == model["decode.weight"].data_ptr()


@pytest.mark.parametrize("to", FORMATS)
def test_the_population_is_the_same_in_every_format(tmp_path, source, to):
    record = turn(source, tmp_path / "out", to)
    assert population(tmp_path / "out") == population(source)
    assert record["tensors"] == len(population(source))
    assert record["aliases"] == 1


def test_hdf5_holds_arrays_at_nested_paths(tmp_path, source):
    turn(source, tmp_path / "a.h5", "hdf5")
    state = torch.load(source)
    with h5py.File(tmp_path / "a.h5") as file:
        assert np.array_equal(file["model/conv.weight"][()], state["model"]["conv.weight"].numpy())
        assert np.array_equal(file["optimizer/state/0/exp_avg"][()], state["optimizer"]["state"][0]["exp_avg"].numpy())
        assert np.array_equal(file["half"][()], state["half"].float().numpy())
        assert np.array_equal(file["transposed"][()], state["transposed"].numpy())
        assert file["model/encode.weight"] == file["model/decode.weight"]


def test_parameters_stay_parameters(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    count = torch.nn.Parameter(torch.tensor(3), requires_grad=False)
    torch.save({"w": weight, "count": count, "frozen": frozen}, tmp_path / "a.pt")
    for to in ("hdf5", "safetensors"):
        turn(tmp_path / "a.pt", tmp_path / to, to)
        turn(tmp_path / to, tmp_path / f"{to}.pt", "pytorch")
        found = torch.load(tmp_path / f"{to}.pt", weights_only=True)
        assert all(isinstance(value, torch.nn.Parameter) for value in found.values())
        assert [name for name, value in found.items() if value.requires_grad] == ["w"]


@pytest.mark.parametrize("tree", [torch.arange(3.0), [torch.ones(1), (torch.zeros(1),)], {"": {"": torch.ones(2)}}])
def test_other_roots_than_dicts_come_back(tmp_path, tree):
    torch.save(tree, tmp_path / "a.pt")
    for to in ("hdf5", "safetensors"):
        turn(tmp_path / "a.pt", tmp_path / to, to)
        turn(tmp_path / to, tmp_path / f"{to}.pt", "pytorch")
        assert same(torch.load(tmp_path / f"{to}.pt"), tree)


def test_plain_safetensors_becomes_a_flat_dict(tmp_path):
    tensors = {"fc.weight": torch.randn(3, 2), "fc.bias": torch.randn(3).half()}
    save_file(tensors, tmp_path / "a.safetensors")
    turn(tmp_path / "a.safetensors", tmp_path / "a.pt", "pytorch")
    assert same(torch.load(tmp_path / "a.pt"), dict(sorted(tensors.items())))


@pytest.mark.parametrize("to", FORMATS)
def test_names_of_a_foreign_hdf5_file_are_kept(tmp_path, to):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["conv1/weight"] = np.arange(6, dtype=">f4").reshape(2, 3)
        file["conv1/bias"] = np.arange(3, dtype="<f8")
        file["tied"] = file["conv1/bias"]
        file.create_dataset("packed", data=np.arange(1000.0), chunks=(300,), compression="gzip")
        file.create_group("nothing")
    turn(tmp_path / "a.h5", tmp_path / "out", to)
    assert [row[:2] for row in population(tmp_path / "out")] == [
        ("conv1/bias", ("tied",)), ("conv1/weight", ()), ("packed", ()),
    ]  # fmt: skip
    assert population(tmp_path / "out") == population(tmp_path / "a.h5")


def test_packed_dtypes_keep_their_shape(tmp_path):
    data = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    torch.save({"w": data}, tmp_path / "a.pt")
    for to in FORMATS:
        turn(tmp_path / "a.pt", tmp_path / to, to)
        assert population(tmp_path / to) == population(tmp_path / "a.pt")
    turn(tmp_path / "hdf5", tmp_path / "b.pt", "pytorch")
    found = torch.load(tmp_path / "b.pt")["w"]
    assert found.dtype == data.dtype
    assert torch.equal(found.view(torch.uint8), data.view(torch.uint8))


class Foreign:
    """A class that no other format can carry."""


def test_foreign_objects_are_refused_unless_dropped(tmp_path):
    torch.save({"w": torch.ones(2), "object": Foreign(), "list": [Foreign(), 1]}, tmp_path / "a.pt")
    for to in FORMATS:
        with pytest.raises(UsageError, match=r"Foreign.*--drop-unsupported"):
            turn(tmp_path / "a.pt", tmp_path / "out", to)
    assert os.listdir(tmp_path) == ["a.pt"]
    record = turn(tmp_path / "a.pt", tmp_path / "out", "pytorch", drop=True)
    assert len(record["dropped"]) == 2
    assert "object is a" in record["dropped"][0]
    assert same(torch.load(tmp_path / "out", weights_only=True), {"w": torch.ones(2), "list": [None, 1]})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_quantised_tensor_is_refused_since_its_scale_would_be_lost(tmp_path):
    torch.save({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "w": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(UsageError, match="q: qint8 has a scale"):
        turn(tmp_path / "a", tmp_path / "out", "hdf5")
    turn(tmp_path / "a", tmp_path / "out", "pytorch", drop=True)
    assert same(torch.load(tmp_path / "out"), {"w": torch.ones(1)})


def test_two_tensors_of_one_name_are_refused(tmp_path):
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"two tensors are called a\.b"):
        turn(tmp_path / "a.pt", tmp_path / "out", "safetensors", drop=True)


def test_a_record_of_a_tensor_that_is_gone_is_refused_unless_dropped(tmp_path):
    record = '{"dict":{"w":{"tensor":"w"},"gone":{"tensor":"gone"},"epoch":3}}'
    save_file({"w": torch.ones(2), "new": torch.ones(1)}, tmp_path / "a", metadata={"flipper_tree": record})
    with pytest.raises(UsageError, match="names gone, but there is no such tensor"):
        turn(tmp_path / "a", tmp_path / "out", "pytorch")
    turn(tmp_path / "a", tmp_path / "out", "pytorch", drop=True)
    assert same(torch.load(tmp_path / "out"), {"w": torch.ones(2), "epoch": 3, "new": torch.ones(1)})


def test_expanded_tensors_become_whole(tmp_path):
    torch.save({"w": torch.ones(1).expand(1000, 3)}, tmp_path / "a.pt")
    turn(tmp_path / "a.pt", tmp_path / "b.pt", "pytorch")
    assert same(torch.load(tmp_path / "b.pt"), {"w": torch.ones(1000, 3)})


def test_views_that_overlap_are_named_and_others_are_not(tmp_path):
    base = torch.arange(24.0)
    state = {
        "front": base[:10], "back": base[5:15], "repeated": torch.ones(1).expand(4), "tied": base[20:],
        "even": base[15:20:2], "odd": base[16:20:2], "square": (square := torch.ones(3, 3)), "turned": square.t(),
        "twin": base[20:], "alone": torch.ones(4, 5).t(), "inside": torch.ones(9)[2:4],
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    record = turn(tmp_path / "a.pt", tmp_path / "b.pt", "pytorch")
    assert record["unfolded"] == ["back", "front", "repeated", "square", "turned"]
    assert same(torch.load(tmp_path / "b.pt"), {name: tensor.contiguous() for name, tensor in state.items()})
    command = [sys.executable, "-m", "flipper", "convert", tmp_path / "a.pt", "-o", tmp_path / "c.h5", "--to", "hdf5"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert told[0].startswith("note: views that overlap in ")
    assert told[0].endswith("c.h5: back, front, repeated, square, turned")
    assert turn(tmp_path / "b.pt", tmp_path / "d.h5", "hdf5")["unfolded"] == []


def test_a_small_file_that_claims_gigabytes_is_refused(tmp_path):
    torch.save({n: torch.ones(1).expand(1 << 24) for n in range(20)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="claim 1342177280 bytes"):
        turn(tmp_path / "a.pt", tmp_path / "out", "safetensors")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_damaged_record_is_a_bad_checkpoint(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "a", metadata={"flipper_tree": '{"dict":'})
    with pytest.raises(CheckpointError, match="structure record"):
        turn(tmp_path / "a", tmp_path / "out", "pytorch")
    assert os.listdir(tmp_path) == ["a"]


def test_an_existing_output_is_kept(tmp_path, source):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(OutputError, match="exists"):
        turn(source, tmp_path / "out", "hdf5")
    assert (tmp_path / "out").read_text() == "precious"
    turn(source, tmp_path / "out", "hdf5", force=True)
    assert h5py.is_hdf5(tmp_path / "out")


def test_a_checkpoint_can_be_converted_onto_itself(tmp_path):
    save_file({"w": torch.arange(5.0)}, tmp_path / "a")
    turn(tmp_path / "a", tmp_path / "a", "pytorch", force=True)
    assert same(torch.load(tmp_path / "a"), {"w": torch.arange(5.0)})


def run(*arguments):
    from click.testing import CliRunner

    from flipper.cli import cli

    return CliRunner().invoke(cli, ["convert", *map(str, arguments)])


def test_the_command_writes_the_file_and_prints_its_record(tmp_path, source):
    result = run(source, "-o", tmp_path / "a.h5", "--to", "hdf5")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert (record["format"], record["source_format"], record["dropped"]) == ("hdf5", "pytorch", [])
    assert record["bytes"] == os.path.getsize(tmp_path / "a.h5")
    assert result.stderr == f"wrote {tmp_path / 'a.h5'}\n"


def test_the_command_names_what_it_leaves_out(tmp_path):
    torch.save({"w": torch.ones(2), "object": Foreign()}, tmp_path / "a.pt")
    result = run(tmp_path / "a.pt", "-o", tmp_path / "b", "--to", "safetensors", "--drop-unsupported")
    assert result.exit_code == 0
    assert "left out: object is a" in result.stderr


def test_the_command_offers_the_formats_that_can_be_written():
    from flipper.checkpoints import writers
    from flipper.cli import convert as command

    assert command.FORMATS == writers.FORMATS


@pytest.mark.parametrize("missing", [("--to", "hdf5"), ("-o", "out"), ("-o", "out", "--to", "zarr")])
def test_wrong_usage_is_exit_2(source, missing):
    assert run(source, *missing).exit_code == 2


def test_marked_hdf5_without_a_record_has_dotted_names(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["flipper_layout"] = "flipper-state/1"
        file["model/fc/weight"] = np.arange(3.0)
    turn(tmp_path / "a.h5", tmp_path / "a.pt", "pytorch")
    assert same(torch.load(tmp_path / "a.pt"), {"model.fc.weight": torch.arange(3.0, dtype=torch.float64)})


@pytest.mark.parametrize("to", FORMATS)
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, to):
    """A limit on file sizes stands in for the disk: the kernel refuses the write in the middle."""
    save_file({"w": torch.zeros(200_000)}, tmp_path / "a")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    call = f"from flipper.cli import main; main(['convert', 'a', '-o', 'out', '--to', {to!r}])"
    done = subprocess.run(
        [sys.executable, "-B", "-c", f"{limit}; {call}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "flipper: error: out can't be written: File too large\n"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["digits-keras.keras", "digits-keras.weights.h5"])
def test_a_converted_keras_file_draws_the_same_faults(name: str, tmp_path: Path) -> None:
    """The layer names that Keras files carry beside the stored ones don't take their place."""
    import flipper

    source = Path(__file__).parents[1] / "sample_checkpoints" / name
    flipper.convert(flipper.open(source), tmp_path / "converted", "safetensors")
    plans = [flipper.draw(path, flipper.FaultModel(count=20), seed=3) for path in (source, tmp_path / "converted")]
    assert list(plans[0]) == list(plans[1])
