"""`flipper inspect`: rows, the JSON document, the population, statistics against numpy."""

import os

import h5py
import numpy as np
import pytest
import torch
from cli_tools import CNN, MLP, SAMPLES, here, is_one_error, rows_of, strict
from safetensors.numpy import load_file, save_file

ROW = ["name", "aliases", "layer", "role", "dtype", "shape", "elements", "bytes", "file", "offset", "storage", "reason"]
STATISTICS = ["min", "max", "mean", "std", "zeros", "nans", "infs"]


def document(*arguments):
    code, out, err = here("inspect", *arguments, "--format", "json")
    assert code == 0, err
    return strict(out)


def test_json_is_the_document_of_the_contract():
    found = document(MLP)
    assert list(found) == ["path", "format", "size", "tensors", "population"]
    assert (found["path"], found["format"], found["size"]) == (str(MLP), "pytorch", os.path.getsize(MLP))
    assert list(found["population"]) == ["tensors", "elements", "bits", "bits_by_role"]
    assert all(list(row) == ROW for row in found["tensors"])


def test_every_tensor_is_a_row_integers_included():
    names = [row["name"] for row in rows_of("inspect", SAMPLES / "digits-cnn.safetensors")]
    assert names == sorted(load_file(SAMPLES / "digits-cnn.safetensors"))
    assert {"int64", "float32"} <= {row["dtype"] for row in rows_of("inspect", CNN)}


def test_rows_agree_with_the_file():
    state = load_file(SAMPLES / "digits-mlp.safetensors")
    data = (SAMPLES / "digits-mlp.safetensors").read_bytes()
    for row in rows_of("inspect", SAMPLES / "digits-mlp.safetensors"):
        tensor = state[row["name"]]
        assert (row["shape"], row["elements"], row["bytes"]) == (list(tensor.shape), tensor.size, tensor.nbytes)
        assert data[row["offset"] : row["offset"] + row["bytes"]] == tensor.tobytes()
        assert (row["file"], row["storage"], row["reason"]) == ("digits-mlp.safetensors", "plain", None)
        assert row["layer"] == row["name"].rpartition(".")[0] or "." not in row["name"]


def test_files_of_a_directory_are_relative_to_it():
    for row in rows_of("inspect", SAMPLES / "digits-cnn-sharded"):
        assert (SAMPLES / "digits-cnn-sharded" / row["file"]).is_file()


def test_a_selection_narrows_rows_and_population():
    found = document(CNN, "--layer", "fc", "--bits", "exponent")
    assert [row["name"] for row in found["tensors"]] == ["model.fc.bias", "model.fc.weight"]
    elements = 10 * 512 + 10
    assert found["population"] == {
        "tensors": 2, "elements": elements, "bits": 8 * elements, "bits_by_role": {"parameter": 8 * elements},
    }  # fmt: skip


def test_under_adam_two_thirds_are_optimizer_state():
    by_role = document(CNN)["population"]["bits_by_role"]
    assert by_role["optimizer"] / sum(by_role.values()) == pytest.approx(2 / 3, abs=0.01)


def test_without_a_selection_floats_make_the_population():
    found = document(CNN)
    floats = [row for row in found["tensors"] if row["dtype"].startswith(("float", "bfloat", "complex"))]
    assert found["population"]["elements"] == sum(row["elements"] for row in floats)
    assert found["population"]["bits"] == 8 * sum(row["bytes"] for row in floats)


@pytest.mark.parametrize("selection", [["--dtype", "int64", "--bits", "exponent"], ["--exclude", "*"]])
def test_an_empty_population_is_0_in_inspect_and_wrong_usage_in_inject(selection):
    assert document(CNN, *selection)["population"] == {"tensors": 0, "elements": 0, "bits": 0, "bits_by_role": {}}
    code, out, err = here("inject", CNN, "--dry-run", "--seed", "1", *selection)
    assert (code, out, is_one_error(err)) == (2, "", True)


def test_the_population_is_told_on_stderr_where_stdout_has_only_rows():
    assert "population: 420,480 bits in 13,140 elements" in here("inspect", MLP)[2]
    assert here("inspect", MLP, "--format", "json")[2] == ""
    assert here("inspect", MLP, "--exclude", "*")[2] == "population: 0 bits in 0 elements\n"


def test_statistics_are_those_of_numpy():
    state = load_file(SAMPLES / "digits-cnn.safetensors")
    rows = rows_of("inspect", SAMPLES / "digits-cnn.safetensors", "--stats")
    for row in rows:
        values = state[row["name"]].astype(np.float64)
        assert list(row) == ROW + STATISTICS
        assert (row["min"], row["max"]) == (values.min(), values.max())
        assert row["mean"] == pytest.approx(values.mean(), rel=1e-9, abs=1e-15)
        assert row["std"] == pytest.approx(values.std(), rel=1e-7, abs=1e-15)
        assert (row["zeros"], row["nans"], row["infs"]) == (np.count_nonzero(values == 0), 0, 0)


def test_statistics_of_values_that_are_not_finite(tmp_path):
    """They are counted, and left out of the rest; where nothing is left there is nothing to say."""
    save_file(
        {
            "mixed": np.array([np.nan, np.inf, -np.inf, 0, -0.0, 2], np.float32),
            "none": np.array([np.nan, np.nan], np.float16),
            "empty": np.zeros((0, 3), np.float32),
            "huge": np.array([np.finfo(np.float64).max] * 2),
        },
        tmp_path / "a",
    )
    rows = {row["name"]: [row[key] for key in STATISTICS] for row in rows_of("inspect", tmp_path / "a", "--stats")}
    assert rows["mixed"] == [0, 2, 2 / 3, pytest.approx(np.std([0, 0, 2])), 2, 1, 2]
    assert rows["none"] == [None, None, None, None, 0, 2, 0]
    assert rows["empty"] == [None, None, None, None, 0, 0, 0]
    assert rows["huge"][:2] == [np.finfo(np.float64).max] * 2


def test_statistics_of_other_dtypes(tmp_path):
    import ml_dtypes

    values = np.array([1.5, -2, 0.25, 0], np.float32)
    torch.save(
        {
            "bfloat16": torch.tensor(values).bfloat16(),
            "fp8": torch.tensor(values).to(torch.float8_e4m3fn),
            "int8": torch.tensor([-128, 0, 127], dtype=torch.int8),
            "bool": torch.tensor([True, False, True]),
            "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        },
        tmp_path / "a",
    )
    rows = {row["name"]: [row[key] for key in STATISTICS] for row in rows_of("inspect", tmp_path / "a", "--stats")}
    assert rows["bfloat16"][:3] == rows["fp8"][:3] == [-2, 1.5, values.astype(ml_dtypes.bfloat16).mean()]
    assert rows["int8"][:2] == [-128, 127]
    assert (rows["bool"][:2], rows["bool"][4]) == ([0, 1], 1)
    assert rows["uint8"][:3] == [0, 255, 127.5]


def test_what_flipper_cannot_strike_is_a_row_with_the_reason(tmp_path):
    with h5py.File(tmp_path / "a", "w") as file:
        file["text"] = "hello"
        file["w"] = np.ones(3, np.float32)
    rows = {row["name"]: row for row in rows_of("inspect", tmp_path / "a", "--stats")}
    assert rows["w"]["storage"] == "plain"
    assert rows["text"]["storage"] == "unsupported"
    assert rows["text"]["reason"]
    assert rows["text"]["min"] is None
    assert document(tmp_path / "a")["population"]["elements"] == 3
