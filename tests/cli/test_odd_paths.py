"""Paths and files that are not as one thinks: odd names, links, devices, pipes, folders, nothing at all."""

import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from cli_tools import CNN, MLP, SAMPLES, flipper, here, is_one_error, rows_of, strict
from safetensors.numpy import save_file

from flipper.shell_words import path_word

NAMES = ["with space", "-dash", "--", "é\u2028x", "new\nline", "quote'\"`$(x)%s{0}*?[x]", "a" * 200, "\udcff"]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_is_told_names_a_file_as_a_shell_takes_it(tmp_path, name):
    (tmp_path / name).write_text("seen")
    words = ["sh", "-c", f"cat {path_word(name)}"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=True).stdout == b"seen"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_may_be_called_anything(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copy(MLP, tmp_path / name)
    done = flipper("inject", "-o", f"./out{name}", "--seed", "1", "--count", "3", "-q", "--", name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    record = strict(done.stdout)
    assert (record["output"], record["manifest"]) == (f"out{name}", f"out{name}.flipper.json")
    assert json.loads((tmp_path / record["manifest"]).read_text())["source"]["path"] == name
    assert flipper("inspect", "--format", "table", "--", name, cwd=tmp_path).returncode == 0
    proof = ["--manifest", record["manifest"], "--source", f"./{name}"]
    assert flipper("verify", *proof, "--", record["output"], cwd=tmp_path).returncode == 0
    assert flipper("undo", "--", record["output"], cwd=tmp_path).returncode == 0
    assert (tmp_path / record["output"]).read_bytes() == MLP.read_bytes()


@pytest.mark.parametrize("style", ["json", "jsonl", "table"])
def test_a_tensor_s_name_does_not_steer_a_terminal(tmp_path, style):
    """Controls of C1 (\x9b begins a terminal's commands), of lines, and of the order of writing."""
    name = "a\x7f\x85\x9b31m\u2028\u202e\u2066é"
    save_file({name: np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    code, out, err = here("inspect", tmp_path / "a.safetensors", "--format", style, "-q")
    assert (code, err) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in out)
    if style != "table":
        row = strict(out) if style == "jsonl" else strict(out)["tensors"][0]
        assert row["name"] == name


def test_a_name_that_leaves_no_room_for_the_manifest_fails_cleanly(tmp_path):
    for length in (245, 256, 5000):
        code, out, err = here("inject", MLP, "-o", tmp_path / ("x" * length), "--seed", "1")
        assert (code, out, is_one_error(err)) == (1, "", True)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"\0" * 10_000, b"PK\3\4", b"\x80\2", b"\x89HDF\r\n\x1a\n", b"{}", b"\xff" * 9]
)
@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "inject"])
def test_a_file_with_nothing_in_it_is_no_checkpoint(tmp_path, content, command):
    (tmp_path / "a").write_bytes(content)
    more = {"convert": ["-o", tmp_path / "b", "--to", "hdf5"], "inject": ["-o", tmp_path / "b", "--seed", "1"]}
    code, out, err = here(command, tmp_path / "a", *more.get(command, []))
    assert (code, out, is_one_error(err)) == (4, "", True)
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_no_file_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in ("/dev/null", "/dev/zero", tmp_path / "pipe", tmp_path / "folder", "/proc"):
        code, out, err = here("inspect", path)
        assert (code, out, is_one_error(err)) == (4, "", True), path


@pytest.mark.parametrize("path", ["", "-", "nowhere", "nowhere/a", "LICENSE/a"])
def test_what_is_not_there_is_wrong_usage(path):
    code, out, err = here("inspect", path)
    assert (code, out, is_one_error(err)) == (2, "", True)


@pytest.mark.parametrize("output", ["", ".", "..", "folder", "folder/", "folder/..", "nowhere/a", "file/a", "pipe",
                                    "stdout", "null", "to pipe"])  # fmt: skip
@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("command", ["inject", "convert"])
def test_what_is_no_place_for_an_output_fails_cleanly(tmp_path, monkeypatch, command, output, force):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    links = {"stdout": "/proc/self/fd/1", "null": "/dev/null", "to pipe": "pipe"}
    for name, there in links.items():
        os.symlink(there, tmp_path / name)
    more = ["--seed", "1", "-q"] if command == "inject" else ["--to", "hdf5"]
    code, out, err = here(command, MLP, "-o", output, *more, *force)
    assert (code, out, is_one_error(err)) == (1, "", True), err
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "null", "pipe", "stdout", "to pipe"]
    assert not os.listdir(tmp_path / "folder")
    assert {name: os.readlink(tmp_path / name) for name in links} == links


def test_the_source_is_no_place_for_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(MLP, "a")
    os.symlink("a", "link")
    os.link("a", "hard")
    for output in ("a", "./a", str(tmp_path / "a"), "link", "hard"):
        code, _, err = here("inject", "a", "-o", output, "--force", "--seed", "1", "-q")
        assert (code, is_one_error(err)) == (2, True), output
    assert (tmp_path / "a").read_bytes() == MLP.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "hard", "link"]


def test_the_manifest_is_neither_the_source_nor_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(MLP, "a")
    for place in ("a", "b"):
        code, _, err = here("inject", "a", "-o", "b", "--manifest", place, "--seed", "1", "-q", "--force")
        assert (code in (1, 2), is_one_error(err)) == (True, True), place
        assert (tmp_path / "a").read_bytes() == MLP.read_bytes()
        assert os.listdir(tmp_path) == ["a"]
    code, _, err = here("inject", "a", "--in-place", "--manifest", "a", "--seed", "1", "-q", "--force")
    assert (code in (1, 2), is_one_error(err)) == (True, True)
    assert (tmp_path / "a").read_bytes() == MLP.read_bytes()


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_device_without_end_is_not_read(tmp_path, device):
    """Neither as a plan nor as a manifest, nor as what a new manifest replaces; memory is bounded, lest it be."""
    shutil.copy(MLP, tmp_path / "a")
    lines = (
        f"inject a -o b --plan {device}", f"inject a -o b --seed 1 --force --manifest {device}",
        f"replay {device} a -o b", f"undo a --manifest {device}", f"verify a --manifest {device}",
    )  # fmt: skip
    for line in lines:
        limited = f"ulimit -v 4000000; {sys.executable} -m flipper {line}"
        done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode in (1, 2), is_one_error(done.stderr)) == (True, True), (line, done.stderr)
        assert "device" in done.stderr or "no regular file" in done.stderr
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == MLP.read_bytes()


def test_nothing_is_an_empty_plan_and_no_manifest(tmp_path):
    (row,) = rows_of("inject", MLP, "-o", tmp_path / "a", "--plan", "/dev/null")
    assert row["faults"] == 0
    code, _, err = here("replay", "/dev/null", MLP, "-o", tmp_path / "b")
    assert (code, is_one_error(err)) == (1, True)


def test_a_directory_may_be_the_one_one_is_in(tmp_path, monkeypatch):
    shutil.copytree(SAMPLES / "digits-cnn-dcp", tmp_path / "dcp")
    monkeypatch.chdir(tmp_path / "dcp")
    former = {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()}
    rows_of("inject", ".", "--in-place", "--seed", "1")
    assert (tmp_path / "dcp.flipper.json").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()} != former
    rows_of("undo", ".")
    assert {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()} == former
    assert here("inject", ".", "-o", "inside", "--seed", "1")[0] == 2
    assert rows_of("inject", ".", "-o", "../copy", "--seed", "1")[0]["manifest"] == "../copy.flipper.json"


def test_a_plan_may_come_through_a_named_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text = '{"tensor":"model.fc1.bias","flat":0,"bits":[1]}'
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
    writer.start()
    (row,) = rows_of("inject", MLP, "--dry-run", "--plan", tmp_path / "pipe")
    writer.join()
    assert (row["tensor"], row["bits"]) == ("model.fc1.bias", [1])


def test_links_to_a_checkpoint_are_followed_for_reading(tmp_path):
    os.symlink(CNN, tmp_path / "link")
    assert len(rows_of("inspect", tmp_path / "link")) == len(rows_of("inspect", CNN))
    os.symlink(tmp_path / "gone", tmp_path / "dangling")
    os.symlink(tmp_path / "ring", tmp_path / "ring")
    for name in ("dangling", "ring"):
        code, out, err = here("inspect", tmp_path / name)
        assert (code, out, is_one_error(err)) == (2, "", True)


@pytest.mark.parametrize("pattern", ["", "re:(", "re:" + "(" * 500, "[", "*" * 100 + "x", "re:[", "\n", "\udcff", "é"])
def test_patterns_that_match_nothing_or_are_none(pattern):
    done = flipper("inspect", MLP, "--layer", pattern)
    assert (done.returncode, done.stdout, is_one_error(done.stderr)) == (2, "", True)
