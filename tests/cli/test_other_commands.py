"""`flipper replay`, `undo`, `diff`, `verify` and `convert` as a user runs them."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest
import torch
from cli_tools import CNN, MLP, SAMPLES, here, is_one_error, rows_of, strict
from safetensors.numpy import load_file, save_file

CNN_TENSORS = SAMPLES / "digits-cnn.safetensors"


@pytest.fixture
def struck(tmp_path):
    """An altered copy with its manifest."""
    path = tmp_path / "struck.pt"
    assert here("inject", CNN, "-o", path, "--seed", "1", "--count", "9", "--layer", "fc")[0] == 0
    return path


def manifest(path):
    return path.with_name(path.name + ".flipper.json")


def test_replay_strikes_the_same_faults_in_another_format(tmp_path, struck):
    (record,) = rows_of("replay", manifest(struck), CNN_TENSORS, "-o", tmp_path / "out")
    assert (record["format"], record["faults"], record["seed"]) == ("safetensors", 9, 1)
    rows = json.loads(manifest(struck).read_text())["faults"]
    before, after = load_file(CNN_TENSORS), load_file(tmp_path / "out")
    for row in rows:
        old, new = (state[row["tensor"]].view(np.uint32).ravel()[row["flat"]] for state in (before, after))
        assert (f"0x{old:08x}", f"0x{new:08x}") == (row["before"], row["after"])
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    assert changed == len(rows)


@pytest.mark.parametrize("rename", ["model.=net.", "re:model\\.(.*)=net.\\1"])
def test_replay_renames(tmp_path, struck, rename):
    state = {name.replace("model.", "net.", 1): tensor for name, tensor in load_file(CNN_TENSORS).items()}
    save_file(state, tmp_path / "other")
    arguments = ["replay", manifest(struck), tmp_path / "other", "-o", tmp_path / "out"]
    assert here(*arguments)[0] in (1, 2)
    assert rows_of(*arguments, "--rename", rename)[0]["faults"] == 9


def test_replay_in_place_can_be_undone(tmp_path, struck):
    shutil.copy(CNN, tmp_path / "copy")
    rows_of("replay", manifest(struck), tmp_path / "copy", "--in-place")
    assert (tmp_path / "copy").read_bytes() == struck.read_bytes()
    rows_of("undo", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CNN.read_bytes()


def test_undo_takes_a_named_manifest(tmp_path, struck):
    moved = manifest(struck).rename(tmp_path / "elsewhere.json")
    assert here("undo", struck)[0] == 2
    (record,) = rows_of("undo", struck, "--manifest", moved)
    assert (record["file"], record["manifest"], record["seed"]) == (str(struck), str(moved), 1)
    assert struck.read_bytes() == CNN.read_bytes()


def test_undo_refuses_a_byte_that_is_neither(tmp_path, struck):
    row = json.loads(manifest(struck).read_text())["faults"][0]
    data = bytearray(struck.read_bytes())
    data[row["offset"]] ^= 0x55
    struck.write_bytes(data)
    code, out, err = here("undo", struck)
    assert (code, out, is_one_error(err)) == (1, "", True)
    assert struck.read_bytes() == data
    assert manifest(struck).exists()


def test_diff_rows_are_the_contract(struck):
    code, out, err = here("diff", CNN, struck)
    rows = [strict(line) for line in out.splitlines()]
    wanted = json.loads(manifest(struck).read_text())["faults"]
    assert code == 3
    assert list(rows[0]) == [
        "tensor", "flat", "index", "dtype", "before", "after", "xor", "bits", "fields", "before_value", "after_value",
    ]  # fmt: skip
    for row, fault in zip(rows, wanted, strict=True):
        assert {key: row[key] for key in row if key != "xor"} == {key: fault[key] for key in row if key != "xor"}
        assert int(row["xor"], 16) == int(row["before"], 16) ^ int(row["after"], 16)
    assert f"elements that differ: {len(rows)}," in err


def test_diff_of_equal_states_in_other_formats_is_0():
    for name in ("digits-cnn.h5", "digits-cnn.safetensors", "digits-cnn-legacy.pt", "digits-cnn-dcp"):
        code, out, _ = here("diff", CNN, SAMPLES / name)
        assert (code, out) == (0, ""), name


def test_diff_names_what_has_no_partner(tmp_path):
    save_file({"a": np.ones(2, np.float32), "t": np.ones(2, np.float32), "s": np.ones(2)}, tmp_path / "a")
    save_file({"b": np.ones(2, np.float32), "t": np.ones(2, np.float16), "s": np.ones(3)}, tmp_path / "b")
    code, out, _ = here("diff", tmp_path / "a", tmp_path / "b")
    kinds = {row["tensor"]: row["kind"] for row in map(strict, out.splitlines())}
    assert (code, kinds) == (3, {"a": "only-in-a", "b": "only-in-b", "t": "dtype", "s": "shape"})


def test_diff_summary_counts(struck):
    code, out, _ = here("diff", CNN, struck, "--summary")
    record = strict(out)
    rows = json.loads(manifest(struck).read_text())["faults"]
    assert (code, record["equal"], record["elements"], record["bits"]) == (3, False, len(rows), 9)
    assert sum(record["positions"].values()) == sum(record["fields"].values()) == 9
    assert strict(here("diff", CNN, CNN, "--summary")[1])["equal"] is True


def test_undo_keeps_the_record_of_another_file(tmp_path, monkeypatch):
    """Undoing a copy, or the wrong file, must not take away what the struck file itself needs; its own record goes."""
    monkeypatch.chdir(tmp_path)
    former = CNN.read_bytes()
    assert here("inject", CNN, "-o", "a", "--seed", "1", "--count", "9", "-q")[0] == 0
    shutil.copy("a", "copy")
    shutil.copy(CNN, "clean")
    for other in ("copy", "clean"):
        code, _, err = here("undo", other, "--manifest", "a.flipper.json")
        assert (code, err) == (0, "kept a.flipper.json, the record of a\n")
        assert (tmp_path / other).read_bytes() == former
    assert (tmp_path / "a").read_bytes() != former
    code, _, err = here("undo", "a")
    assert (code, err) == (0, "removed a.flipper.json\n")
    assert (tmp_path / "a").read_bytes() == former


def test_undo_takes_away_the_record_of_a_file_that_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for moved, place in (("b", "a.flipper.json"), ("c", "c.flipper.json"), ("d", "elsewhere")):
        assert here("inject", CNN, "-o", "a", "--seed", "1", "-q")[0] == 0
        os.rename("a", moved)
        os.rename("a.flipper.json", place)
        assert here("undo", moved, "--manifest", place)[0] == 0
        assert (tmp_path / moved).read_bytes() == CNN.read_bytes()
        assert not (tmp_path / place).exists()


def test_verify_says_what_was_checked(struck):
    for more, complete, faults in (
        ([], False, None),
        (["--manifest", manifest(struck)], False, 9),
        (["--manifest", manifest(struck), "--source", CNN], True, 9),
    ):
        (record,) = rows_of("verify", struck, *more)
        assert (record["ok"], record["complete"], record["problems"]) == (True, complete, [])
        assert record["faults"] in (faults, len(json.loads(manifest(struck).read_text())["faults"]))


def test_verify_finds_another_change(struck):
    data = bytearray(struck.read_bytes())
    data[rows_of("inspect", struck, "--layer", "conv1.weight")[0]["offset"]] ^= 1
    struck.write_bytes(data)
    code, out, err = here("verify", struck, "--manifest", manifest(struck), "--source", CNN)
    record = strict(out)
    assert (code, record["ok"], record["problems_found"] > 0) == (3, False, True)
    assert len(err.splitlines()) == 1


def test_verify_never_opens_the_recorded_source_itself(tmp_path):
    shutil.copy(MLP, tmp_path / "source")
    rows_of("inject", tmp_path / "source", "-o", tmp_path / "out", "--seed", "1")
    os.remove(tmp_path / "source")
    os.mkfifo(tmp_path / "source")
    assert rows_of("verify", tmp_path / "out", "--manifest", manifest(tmp_path / "out"))[0]["complete"] is False


@pytest.mark.parametrize(("to", "suffix"), [("safetensors", ".safetensors"), ("pytorch", ".pt"), ("hdf5", ".h5")])
def test_convert_there_and_back_loses_nothing(tmp_path, to, suffix):
    (record,) = rows_of("convert", CNN, "-o", tmp_path / f"a{suffix}", "--to", to)
    assert record["output"] == str(tmp_path / f"a{suffix}")
    assert (record["format"], record["source_format"]) == (to, "pytorch")
    assert here("diff", CNN, tmp_path / f"a{suffix}")[:2] == (0, "")
    rows_of("convert", tmp_path / f"a{suffix}", "-o", tmp_path / "back.pt", "--to", "pytorch")
    assert here("diff", CNN, tmp_path / "back.pt")[:2] == (0, "")
    one, other = torch.load(CNN, weights_only=True), torch.load(tmp_path / "back.pt", weights_only=True)
    assert flat(one) == flat(other) or to == "safetensors"


def flat(value, prefix=""):
    """Tensors and scalars by dotted name."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, item in pairs for name, leaf in flat(item, f"{prefix}{key}.").items()}
    return {prefix: value.tolist() if isinstance(value, torch.Tensor) else value}


def test_convert_says_what_it_wrote_on_stderr(tmp_path):
    code, out, err = here("convert", MLP, "-o", tmp_path / "a", "--to", "hdf5")
    assert (code, err) == (0, f"wrote {tmp_path / 'a'}\n")
    assert strict(out)["bytes"] == os.path.getsize(tmp_path / "a")
    with h5py.File(tmp_path / "a") as file:
        assert file["model/fc1.weight"].shape == (64, 64)


def test_a_table_of_a_record_has_a_line_for_each_of_a_list(tmp_path):
    out = here("diff", MLP, CNN, "--summary", "--format", "table")[1]
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("unmatched"))
    assert lines[0].split() == ["equal", "false"]
    assert "only-in-b" in lines[start]
    assert lines[start + 1].startswith("   ")
    assert len(lines) > 20
