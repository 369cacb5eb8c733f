"""`flipper inject --plan`: faults from a file or stdin instead of drawing."""

import json
import os

import h5py
import numpy as np
import pytest
from cli_tools import CNN, MLP, flipper, here, is_one_error, rows_of, strict
from safetensors.numpy import load_file, save_file


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    save_file({"w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float16)}, path)
    return path


def struck(path):
    return {name: tensor.view(f"u{tensor.itemsize}").ravel().tolist() for name, tensor in load_file(path).items()}


ONE = 0x3F800000


@pytest.mark.parametrize(("text", "flat", "after"), [
    ('{"tensor":"w","flat":5,"bits":[30,0]}\n', 5, ONE ^ (1 << 30) ^ 1),
    ('{"tensor":"w","flat":5,"bits":[30]}\n\n{"tensor":"w","flat":5,"bits":[0]}', 5, ONE ^ (1 << 30) ^ 1),
    ('[{"tensor":"w","flat":5,"bits":[30]}]', 5, ONE ^ (1 << 30)),
    ('{"tensor":"w","flat":5,"op":"flip","mask":"0x40000000","value":null}', 5, ONE ^ (1 << 30)),
    ('{"tensor":"w","flat":5,"op":"write","mask":"0xff","value":"0x12"}', 5, ONE | 0x12),
    ('{"tensor":"w","flat":5,"op":"write","mask":255,"value":18,"more":{"is":"ignored"}}', 5, ONE | 0x12),
    ("tensor,flat,bits\nw,5,30\n", 5, ONE ^ (1 << 30)),
    ('tensor,flat,bits\r\nw,5,"[30,0]"\r\n', 5, ONE ^ (1 << 30) ^ 1),
    ("flat,op,mask,value,tensor\n5,write,0xff,0x12,w\n", 5, ONE | 0x12),
    ("\ufefftensor,flat,bits\nw,5,30\n", 5, ONE ^ (1 << 30)),
    ('{"w":[[[1,1],[1]]]}', 5, ONE ^ (1 << 30)),
    ('{"/w":[[[1,1],1],[[0,0],null]]}', 5, ONE ^ (1 << 30)),
])  # fmt: skip
@pytest.mark.parametrize("way", ["file", "stdin"])
def test_each_spelling_of_a_plan(tmp_path, source, text, flat, after, way):
    (tmp_path / "plan").write_text(text, newline="")
    plan = tmp_path / "plan" if way == "file" else "-"
    arguments = ["inject", source, "-o", tmp_path / "out", "--plan", plan]
    if way == "file":
        code, out, err = here(*arguments)
    else:
        done = flipper(*arguments, stdin=text)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert (code, err) == (0, "")
    wanted = {"w": [ONE] * 12, "b": [0x3C00] * 4}
    wanted["w"][flat] = after
    assert struck(tmp_path / "out") == wanted
    assert (strict(out)["seed"], strict(out)["population"]) == (None, None)


@pytest.mark.parametrize("text", ["", "\n", "[]", "{}", "tensor,flat,bits\n", '{"w":[[[0,0],null],[[0,0],[null]]]}'])
def test_an_empty_plan_is_a_clean_copy(tmp_path, source, text):
    (tmp_path / "plan").write_text(text)
    (record,) = rows_of("inject", source, "-o", tmp_path / "out", "--plan", tmp_path / "plan")
    assert (record["faults"], record["bits_changed"]) == (0, 0)
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("more", [
    ["--count", "1"], ["--count", "0"], ["--ber", "0.1"], ["--fraction", "0.1"], ["--fit", "1", "--hours", "1"],
    ["--seed", "0"], ["--layer", "w"], ["--bits", "sign"], ["--finite"], ["--spread", "uniform"],
])  # fmt: skip
def test_a_plan_with_an_amount_a_seed_or_a_selection_is_wrong_usage(tmp_path, source, more):
    (tmp_path / "plan").write_text("[]")
    code, out, err = here("inject", source, "-o", tmp_path / "out", "--plan", tmp_path / "plan", *more)
    assert (code, out, is_one_error(err)) == (2, "", True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("hello\n", "'tensor' is missing"),
    ("tensor,bits\nw,1\n", "'flat' is missing"),
    ('{"tensor":"w","flat":5}', "'bits' is missing"),
    ('{"tensor":"w","flat":-1,"bits":[1]}', "-1"),
    ('{"tensor":"w","flat":1.5,"bits":[1]}', "1.5"),
    ('{"tensor":"w","flat":5,"bits":[64]}', "positions go from 0 to 63"),
    ('{"tensor":"w","flat":5,"bits":[1,1]}', "twice"),
    ('{"tensor":"w","flat":5,"op":"or","mask":1}', "'or' is none of flip, write"),
    ('{"tensor":"w","flat":5,"bits":[1]}\n{"tensor":', "line 2"),
    ('{"tensor":"w","flat":5,"bits":[1]}\n[1]', "line 2"),
    ('{"nope":[[[0,0],[1]]]}', "no tensor 'nope'"),
    ('{"w":[[[],[1]]]}', "no indexes"),
    ('{"w":[[[0,9],[1]]]}', "[0, 9]"),
    ('{"w":[[[0,0],[32]]]}', "bit 32"),
    ('{"tensor":"nope","flat":0,"bits":[1]}', "no tensor 'nope'"),
    ('{"tensor":"w","flat":12,"bits":[1]}', "12 elements"),
    ('{"tensor":"b","flat":0,"bits":[16]}', "16 bits"),
    ('{"tensor":"w","flat":' + "9" * 5000 + ',"bits":[1]}', "line 1"),
    ("[" * 100_000, ""),
    ('{"schema":"flipper-manifest/1","faults":[]}', "flipper replay"),
    (b"\xff\xfe", "utf-8"),
])  # fmt: skip
def test_what_is_no_plan_is_refused_with_its_place(tmp_path, source, text, message):
    (tmp_path / "plan").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = here("inject", source, "-o", tmp_path / "out", "--plan", tmp_path / "plan")
    assert code in (1, 2)
    assert (out, is_one_error(err)) == ("", True)
    assert message in err
    assert sorted(os.listdir(tmp_path)) == ["plan", "source"]


@pytest.mark.parametrize("style", ["json", "jsonl", "csv"])
@pytest.mark.parametrize("effect", ["flip", "random"])
def test_rows_of_a_dry_run_can_be_fed_back(tmp_path, style, effect):
    drawn = ["--seed", "4", "--count", "50", "--effect", effect]
    assert here("inject", CNN, "-o", tmp_path / "drawn", *drawn)[0] == 0
    (tmp_path / "plan").write_text(here("inject", CNN, "--dry-run", *drawn, "--format", style)[1], newline="")
    assert here("inject", CNN, "-o", tmp_path / "planned", "--plan", tmp_path / "plan")[0] == 0
    assert (tmp_path / "drawn").read_bytes() == (tmp_path / "planned").read_bytes()


def test_rows_of_a_manifest_can_be_fed_back(tmp_path):
    assert here("inject", CNN, "-o", tmp_path / "drawn", "--seed", "4", "--count", "50")[0] == 0
    rows = json.loads((tmp_path / "drawn.flipper.json").read_text())["faults"]
    (tmp_path / "plan").write_text(json.dumps(rows))
    assert here("inject", CNN, "-o", tmp_path / "planned", "--plan", tmp_path / "plan")[0] == 0
    assert (tmp_path / "drawn").read_bytes() == (tmp_path / "planned").read_bytes()


def test_odd_names_survive_the_way_there_and_back(tmp_path):
    names = ["", "a\nb", 'with,comma"', "é\u2028\x85x", " spaced "]
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "a")
    for style in ("json", "jsonl", "csv"):
        text = here("inject", tmp_path / "a", "--dry-run", "--fraction", "1", "--seed", "1", "--format", style)[1]
        (tmp_path / "plan").write_text(text, encoding="utf-8", newline="")
        code, _, err = here("inject", tmp_path / "a", "-o", tmp_path / style, "--plan", tmp_path / "plan")
        assert code == 0, err
    assert (tmp_path / "json").read_bytes() == (tmp_path / "jsonl").read_bytes() == (tmp_path / "csv").read_bytes()


def test_a_plan_strikes_any_format(tmp_path):
    with h5py.File(tmp_path / "a", "w") as file:
        file["layer/w"] = np.ones(4, np.float32)
    (tmp_path / "plan").write_text('{"tensor":"layer/w","flat":2,"bits":[31]}')
    assert here("inject", tmp_path / "a", "-o", tmp_path / "b", "--plan", tmp_path / "plan")[0] == 0
    with h5py.File(tmp_path / "b") as file:
        assert file["layer/w"][:].tolist() == [1, 1, -1, 1]


def test_a_plan_that_is_not_there_is_wrong_usage():
    code, out, err = here("inject", MLP, "--dry-run", "--plan", "nowhere")
    assert (code, out, err) == (2, "", "flipper: error: --plan nowhere: No such file or directory\n")
