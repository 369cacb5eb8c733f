"""`flipper inject`: seeds, the record, dry runs, what a run leaves behind."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from cli_tools import CNN, MLP, SAMPLES, here, is_one_error, rows_of, strict
from safetensors.numpy import save_file

RECORD = [
    "output", "manifest", "format", "seed", "faults", "elements", "bits_changed", "unchanged", "tensors_struck",
    "population",
]  # fmt: skip


def inject(*arguments):
    (record,) = rows_of("inject", *arguments)
    return record


def manifest_of(path):
    return json.loads(path.with_name(path.name + ".flipper.json").read_text())


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_reach_from_0_to_below_2_to_the_64(tmp_path, seed):
    assert inject(MLP, "-o", tmp_path / "a", "--seed", seed)["seed"] == seed
    assert manifest_of(tmp_path / "a")["seed"] == seed


@pytest.mark.parametrize("seed", ["-1", 2**64, "1.5", "x", "", "0x10"])
def test_other_seeds_are_wrong_usage(tmp_path, seed):
    code, out, err = here("inject", MLP, "-o", tmp_path / "a", "--seed", seed)
    assert (code, out, is_one_error(err)) == (2, "", True)
    assert not os.listdir(tmp_path)


def test_without_a_seed_one_is_drawn_said_and_recorded(tmp_path):
    seeds = []
    for name in "ab":
        code, out, err = here("inject", MLP, "-o", tmp_path / name)
        assert code == 0
        seeds.append(strict(out)["seed"])
        assert err.splitlines()[0] == f"seed {seeds[-1]}"
        assert manifest_of(tmp_path / name)["seed"] == seeds[-1]
        assert 0 <= seeds[-1] < 2**64
        assert inject(MLP, "-o", tmp_path / "again", "--seed", seeds[-1], "--force")["seed"] == seeds[-1]
        assert (tmp_path / "again").read_bytes() == (tmp_path / name).read_bytes()
    assert seeds[0] != seeds[1]


def test_same_seed_options_and_content_same_bytes(tmp_path):
    """Wherever the file lies and whatever it is called."""
    (tmp_path / "copy.bin").write_bytes(CNN.read_bytes())
    options = ["--seed", 5, "--count", 20, "--bits", "exponent", "--role", "optimizer", "--no-provenance"]
    inject(CNN, "-o", tmp_path / "a", *options)
    inject(tmp_path / "copy.bin", "-o", tmp_path / "b", *options)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != CNN.read_bytes()


def test_the_record_has_the_keys_of_the_contract(tmp_path):
    record = inject(CNN, "-o", tmp_path / "a", "--seed", 5, "--count", 30, "--layer", "fc")
    assert list(record) == RECORD
    assert record["population"] == strict(here("inspect", CNN, "--layer", "fc", "--format", "json")[1])["population"]
    assert record["output"] == str(tmp_path / "a")
    assert record["manifest"] == str(tmp_path / "a.flipper.json")
    rows = manifest_of(tmp_path / "a")["faults"]
    assert (record["faults"], record["format"], record["unchanged"]) == (30, "pytorch", 0)
    assert record["elements"] == len(rows)
    assert record["bits_changed"] == sum(bin(int(row["before"], 16) ^ int(row["after"], 16)).count("1") for row in rows)
    assert record["tensors_struck"] == len({row["tensor"] for row in rows})


def test_writes_that_change_nothing_are_counted_apart(tmp_path):
    save_file({"w": np.zeros(50, np.float32)}, tmp_path / "zeros")
    record = inject(tmp_path / "zeros", "-o", tmp_path / "a", "--seed", 5, "--count", 30, "--effect", "set0")
    assert (record["bits_changed"], record["unchanged"]) == (0, record["elements"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "zeros").read_bytes()


def test_no_fault_is_a_clean_copy(tmp_path):
    record = inject(MLP, "-o", tmp_path / "a", "--seed", 1, "--count", 0)
    assert (record["faults"], record["elements"], record["tensors_struck"]) == (0, 0, 0)
    assert (tmp_path / "a").read_bytes() == MLP.read_bytes()


def test_the_default_is_one_fault(tmp_path):
    assert inject(MLP, "-o", tmp_path / "a", "--seed", 1)["faults"] == 1


SOURCES = ["digits-mlp.pt", "digits-mlp.h5", "digits-mlp.safetensors", "digits-keras.keras", "digits-cnn-dcp",
           "digits-cnn-sharded"]  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_dry_run_prints_the_rows_of_the_manifest_and_writes_nothing(tmp_path, name):
    source = SAMPLES / name
    drawn = ["--seed", 7, "--count", 12]
    before = sorted(os.listdir(SAMPLES))
    inject(source, "-o", tmp_path / "real", *drawn)
    rows = rows_of("inject", source, "-o", tmp_path / "real", "--dry-run", *drawn)
    assert rows == manifest_of(tmp_path / "real")["faults"]
    (tmp_path / "sub").mkdir()
    assert rows_of("inject", source, "-o", tmp_path / "sub/a", "--dry-run", *drawn, "--manifest", tmp_path / "m")[0][
        "file"
    ] in ("sub/a", rows[0]["file"])
    bare = rows_of("inject", source, "--dry-run", *drawn)
    assert [{**row, "file": 0, "offset": 0} for row in bare] == [{**row, "file": 0, "offset": 0} for row in rows]
    assert sorted(os.listdir(tmp_path)) == ["real", "real.flipper.json", "sub"]
    assert sorted(os.listdir(SAMPLES)) == before
    assert not os.listdir(tmp_path / "sub")


def test_a_dry_run_shows_what_was_and_what_will_be():
    (row,) = rows_of("inject", MLP, "--dry-run", "--seed", 7, "--bits", "sign", "--role", "parameter")
    assert row["after_value"] == -row["before_value"]
    assert (row["bits"], row["fields"], row["mask"], row["value"]) == ([31], ["sign"], "0x80000000", None)


def test_the_manifest_goes_where_it_is_told(tmp_path):
    (tmp_path / "records").mkdir()
    record = inject(MLP, "-o", tmp_path / "a", "--seed", 1, "--manifest", tmp_path / "records/m.json")
    assert record["manifest"] == str(tmp_path / "records/m.json")
    assert sorted(os.listdir(tmp_path)) == ["a", "records"]
    assert json.loads((tmp_path / "records/m.json").read_text())["faults"][0]["file"] == "../a"


def test_force_overwrites(tmp_path):
    for name in ("a", "a.flipper.json"):
        (tmp_path / name).write_text("old")
        assert here("inject", MLP, "-o", tmp_path / "a", "--seed", 1)[0] == 1
    assert inject(MLP, "-o", tmp_path / "a", "--seed", 1, "--force")["faults"] == 1


def test_in_place_stacks_and_undo_takes_the_newest_first(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(MLP.read_bytes())
    states = [path.read_bytes()]
    for seed, name in enumerate(["a.flipper.json", "a.flipper.2.json", "a.flipper.3.json"]):
        assert inject(path, "--in-place", "--seed", seed)["manifest"] == str(tmp_path / name)
        states.append(path.read_bytes())
    assert len(set(states)) == 4
    for former in states[-2::-1]:
        (record,) = rows_of("undo", path)
        assert list(record) == ["file", "manifest", "seed", "elements"]
        assert path.read_bytes() == former
    assert os.listdir(tmp_path) == ["a"]


def test_weights_are_spelled_as_the_contract_says(tmp_path):
    weighted = ["--spread", "weighted", "--weight", "fc1=3", "--weight", "fc2=1"]
    rows = rows_of("inject", MLP, "--dry-run", "--seed", 3, "--count", 400, *weighted)
    by_layer = Counter(row["tensor"].split(".")[1] for row in rows)
    assert by_layer.keys() == {"fc1", "fc2"}
    assert 2 < by_layer["fc1"] / by_layer["fc2"] < 4.5
    fields = rows_of(
        "inject", MLP, "--dry-run", "--seed", 3, "--count", 90, "--field-weight", "sign=1,exponent=8,mantissa=0"
    )
    assert {field for row in fields for field in row["fields"]} == {"sign", "exponent"}


@pytest.mark.parametrize("wrong", [
    ["--weight", "fc1=1"], ["--spread", "weighted"], ["--spread", "weighted", "--weight", "fc1"],
    ["--spread", "weighted", "--weight", "fc1=x"], ["--spread", "weighted", "--weight", "=1"],
    ["--spread", "weighted", "--weight", "fc1=1", "--weight", "fc1=2"], ["--field-weight", "sign"],
    ["--field-weight", "sign=1,sign=2"], ["--field-weight", "tail=1"], ["--field-weight", "sign=-1"],
    ["--field-weight", "sign=0"], ["--field-weight", "sign=1", "--ber", "0.1"],
    ["--ber", "0.1", "--spread", "tensor-uniform"], ["--ber", "nan"], ["--ber", "1e999999999"], ["--fraction", "1.1"],
    ["--fit", "1"], ["--hours", "1"], ["--burst", "0"], ["--burst", "99999999999999999999"], ["--count", "-1"],
    ["--count", "1e3"], ["--effect", "flip:0"], ["--effect", "scale:nan"], ["--max-abs", "nan"],
    ["--direction", "up"], ["--count", "1", "--fraction", "0.1"], ["--bits", "99"], ["--bits", ""],
])  # fmt: skip
def test_what_makes_no_sense_is_wrong_usage(wrong):
    code, out, err = here("inject", MLP, "--dry-run", "--seed", "1", *wrong)
    assert (code, out, is_one_error(err)) == (2, "", True), err


def test_no_provenance_makes_manifest_and_output_reproducible(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        inject(MLP, "-o", "a", "--seed", 1, "--no-provenance", "--sha256")
    for name in ("a", "a.flipper.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert str(tmp_path) not in (tmp_path / "one/a.flipper.json").read_text()


def test_source_date_epoch_is_the_time_of_creation(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    inject(MLP, "-o", tmp_path / "a", "--seed", 1)
    assert manifest_of(tmp_path / "a")["created"] == "1970-01-02T00:00:00Z"
