"""Live strikes: on every copy they equal an altered checkpoint, on one they strike that one, and errors are clear."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.numpy import load_file, save_file
from series import LAYOUTS, Run, spec, train_all
from torch import nn

import flipper
from flipper.cli import main
from flipper.errors import UsageError
from flipper.training import recipes, seeds
from flipper.training.faults_file import LiveFaults, faults_of, read_faults
from flipper.training.run import train

# A weight (the one that tensor parallelism splits), a moment and a BatchNorm buffer; None of these ends in NaN.
TABLES: dict[str, dict[str, Any]] = {
    "weight": {"layer": ["model.fc.weight"], "bits": "exponent", "direction": "1to0", "count": 3, "seed": 5},
    "moment": {"layer": ["optimizer.conv2.weight.exp_avg"], "bits": "exponent", "max_abs": 1, "count": 3, "seed": 6},
    "buffer": {"layer": ["model.bn1.running_mean"], "bits": "exponent", "max_abs": 1e9, "count": 3, "seed": 7},
}


def altered(clean: Path, table: dict[str, Any], folder: Path) -> Path:
    """A copy of the checkpoint with the faults of the table; its manifest stands beside it."""
    options = {key: value for key, value in table.items() if key not in ("seed", "layer", "dtype")}
    model = flipper.FaultModel(layers=table["layer"], dtypes=table.get("dtype", ()), **options)
    path = folder / f"{table['layer'][0]}.safetensors"
    flipper.inject(clean, path, flipper.draw(clean, model, seed=table["seed"]))
    return path


def manifest(path: Path) -> LiveFaults:
    return read_faults(Path(f"{path}.flipper.json"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[Run]]]:
    """By layout: the clean run; and by what is struck: live from the table, live from the manifest, and resumed."""

    @functools.cache
    def run(layout: str) -> dict[str, list[Run]]:
        folder = tmp_path_factory.mktemp(layout.replace(":", ""))
        clean, *live = train_all(
            [
                spec("digits-cnn", layout, steps=3, save=folder, save_every=1),
                *(spec("digits-cnn", layout, steps=3, inject=faults_of(each), at=1) for each in TABLES.values()),
            ]
        )
        files = [altered(folder / "step-000001.safetensors", table, folder) for table in TABLES.values()]
        others = train_all(
            [
                *(spec("digits-cnn", layout, steps=3, inject=manifest(file), at=1) for file in files),
                *(spec("digits-cnn", layout, steps=3, resume=file) for file in files),
            ]
        )
        triples = zip(live, others[:3], others[3:], strict=True)
        return {"clean": [clean], **dict(zip(TABLES, map(list, triples), strict=True))}

    return run


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_strike_on_all_copies_equals_the_run_resumed_from_the_altered_file(
    compared: Callable[[str], dict[str, list[Run]]], layout: str, what: str
) -> None:
    """To the bit, in state and in all that later steps depend on; drawn when its time has come, or from a manifest."""
    table, recorded, resumed = compared(layout)[what]
    assert table.digests == resumed.digests
    assert recorded.digests == resumed.digests
    assert table.losses[1:] == resumed.losses
    assert (table.loss, table.accuracy) == (resumed.loss, resumed.accuracy)
    assert table.state_digest != compared(layout)["clean"][0].state_digest
    assert table.loss is not None
    assert math.isfinite(table.loss)


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_event_of_a_strike_counts_every_copy(
    compared: Callable[[str], dict[str, list[Run]]], layout: str, what: str
) -> None:
    (struck,) = compared(layout)[what][0].of("struck")
    assert compared(layout)[what][0].struck_step == 1
    assert {key: struck[key] for key in ("step", "reach", "faults")} == {"step": 1, "reach": "all", "faults": 3}
    assert struck["elements"] == 3 * copies(layout, what)
    assert list(struck["ranks"]) == sorted(set(struck["ranks"]))


def copies(layout: str, what: str) -> int:
    """How many ranks hold an element: replicas do, shards of FSDP and split weights don't, buffers are never split."""
    data, model = 1, 1
    for kind, _, number in (part.partition(":") for part in layout.split("+")):
        if kind in ("ddp", "hooks") or (kind == "fsdp" and what == "buffer"):
            data = int(number)
        if kind == "tensor" and what != "weight":
            model = int(number)
    return data * model


@pytest.mark.parametrize("layout", ["single", "fsdp:2"])
def test_a_strike_on_the_schedule_equals_the_altered_file_and_changes_the_learning_rate(
    tmp_path: Path, layout: str
) -> None:
    tables = [
        {"layer": ["scheduler.last_epoch"], "dtype": ["int64"], "bits": "7", "count": 1, "seed": 1},
        {"layer": ["scheduler._last_lr"], "bits": "sign", "count": 1, "seed": 2},
        {"layer": ["scheduler.base_lrs"], "bits": "mantissa-msb", "count": 1, "seed": 3},
    ]
    options: dict[str, Any] = {"steps": 3}
    clean, *live = train_all(
        [
            spec("mnist5k-cnn", layout, **options, save=tmp_path, save_every=1),
            *(spec("mnist5k-cnn", layout, **options, inject=faults_of(table), at=1) for table in tables),
        ]
    )
    files = [altered(tmp_path / "step-000001.safetensors", table, tmp_path) for table in tables]
    resumed = train_all([spec("mnist5k-cnn", layout, **options, resume=file) for file in files])
    assert [run.digests for run in live] == [run.digests for run in resumed]
    rates = [[event["lr"] for event in run.of("step")] for run in (clean, *live)]
    assert all(struck[0] == rates[0][0] for struck in rates)
    assert rates[2][1] == -rates[0][1]
    assert [struck[1:] != rates[0][1:] for struck in rates[1:]] == [True] * 3


def mlp_faults(seed: int = 1, **table: Any) -> LiveFaults:
    return faults_of(
        {"layer": ["model.fc1.weight"], "bits": "exponent", "max_abs": 8, "count": 4, "seed": seed} | table
    )


def test_one_strikes_a_single_replica_which_the_seed_chooses() -> None:
    """Right after the load and DDP's wrap, which would broadcast rank 0's parameters."""
    options: dict[str, Any] = {"steps": 1, "at": 0, "reach": "one", "probe_every": 1}
    seeds = [*range(8), 3]
    runs = train_all([spec("digits-mlp", "ddp:3", inject=mlp_faults(seed), **options) for seed in seeds])
    for run in runs:
        (struck,) = run.of("struck")
        assert (struck["faults"], struck["elements"], len(struck["ranks"])) == (4, 4, 1)
        assert [event["equal"] for event in run.of("replicas")] == [False]
    assert {run.of("struck")[0]["ranks"][0] for run in runs} == {0, 1, 2}
    assert (runs[-1].digests, runs[-1].of("struck")) == (runs[3].digests, runs[3].of("struck"))


@pytest.mark.parametrize("layout", ["ddp:2", "hooks:2", "ddp:2+pipeline:2"])
def test_a_strike_on_one_rank_leaves_the_other_replica_as_it_is(layout: str) -> None:
    """The first rank's copy is the run's; when the other's is struck, only gradients carry that over."""
    options: dict[str, Any] = {"steps": 1, "at": 0, "inject": mlp_faults(bits="sign", max_abs=None)}
    other = 2 if "pipeline" in layout else 1
    every, first, last = train_all(
        [spec("digits-mlp", layout, reach=reach, **options) for reach in ("all", "rank:0", f"rank:{other}")]
    )
    assert [list(run.of("struck")[0]["ranks"]) for run in (every, first, last)] == [[0, other], [0], [other]]
    assert len({run.state_digest for run in (every, first, last)}) == 3
    mine, theirs = last.of("eval")
    assert (mine.get("replica"), theirs["replica"]) == (None, 1)
    assert mine["loss"] != theirs["loss"]


@pytest.mark.parametrize(
    ("layout", "layer", "owner"),
    [
        ("fsdp:2", "fc1", lambda row, column: row // 32),
        ("fsdp:3", "fc1", lambda row, column: row // 22),
        ("tensor:2", "fc1", lambda row, column: row // 32),
        ("tensor:2", "fc2", lambda row, column: column // 32),
        ("pipeline:2", "fc1", lambda row, column: 0),
        ("pipeline:2", "fc2", lambda row, column: 1),
        ("fsdp:2+tensor:2", "fc2", lambda row, column: 2 * (row // 16) + column // 32),
    ],
)
def test_an_element_that_one_rank_holds_is_struck_there_and_nowhere_else(
    tmp_path: Path, layout: str, layer: str, owner: Callable[[int, int], int]
) -> None:
    """fc1 is 64 x 64, fc2 32 x 64; where their rows and columns lie is written out here."""
    table = {"layer": [f"model.{layer}.weight"], "bits": "exponent", "max_abs": 8, "count": 1}
    start, *_ = train_all([spec("digits-mlp", steps=0, save=tmp_path)])
    model = flipper.FaultModel(layers=table["layer"], bits="exponent", max_abs=8, count=1)
    owners = []
    for seed in (1, 2):
        plan = flipper.draw(Path(start.files[0]), model, seed=seed)
        owners.append(owner(*divmod(int(plan.flat[0]), 64)))
    specs = [
        spec("digits-mlp", layout, steps=1, at=0, inject=faults_of({**table, "seed": seed}), reach=reach)
        for seed, rank in zip((1, 2), owners, strict=True)
        for reach in ("all", "one", f"rank:{rank}")
    ]
    runs = train_all(specs)
    for number, rank in enumerate(owners):
        three = runs[3 * number : 3 * number + 3]
        assert [(list(run.of("struck")[0]["ranks"]), run.of("struck")[0]["elements"]) for run in three] == [
            ([rank], 1)
        ] * 3
        assert len({run.digests for run in three}) == 1
    wrong = (owners[0] + 1) % specs[0].parallel.ranks
    faults = faults_of({**table, "seed": 1})
    with pytest.raises(
        UsageError, match=rf"^--reach rank:{wrong} holds no element \d+ of .*; its owners: {owners[0]}$"
    ):
        train(spec("digits-mlp", layout, steps=1, at=0, inject=faults, reach=f"rank:{wrong}"))


@pytest.mark.parametrize("layout", ["ddp:2", "hooks:2"])
def test_a_buffer_struck_on_the_second_replica_never_reaches_the_parameters(layout: str) -> None:
    """DDP overwrites it with the first replica's before the next pass; under hooks that replica keeps it."""
    table = {"layer": ["model.bn1.running_var"], "bits": "exponent", "finite": True, "count": 4, "seed": 1}
    clean, struck = train_all(
        [
            spec("digits-cnn", layout, steps=2, probe_every=1),
            spec("digits-cnn", layout, steps=2, probe_every=1, at=1, inject=faults_of(table), reach="rank:1"),
        ]
    )
    assert struck.digests == clean.digests
    assert struck.losses == clean.losses
    assert [event["equal"] for event in struck.of("replicas")] == [True, True]
    first, second = (run.of("eval") for run in (clean, struck))
    assert first[0] == second[0]
    assert (first[1] == second[1]) == (layout == "ddp:2")


GRADIENT: dict[str, Any] = {"layer": ["gradient.fc1.weight"], "bits": "exponent", "count": 4, "seed": 2}


def gradient_faults(target: str, **table: Any) -> LiveFaults:
    return faults_of({**GRADIENT, "bits": "sign", "target": target, **table})


def test_summed_gradients_struck_on_every_copy_are_struck_alike_under_ddp_hooks_and_fsdp() -> None:
    faults = faults_of({**GRADIENT, "target": "gradient", "max_abs": 10})
    digests = set()
    for kind in ("ddp", "hooks", "fsdp"):
        probe = 0 if kind == "fsdp" else 1
        options: dict[str, Any] = {"steps": 3, "probe_every": probe}
        struck, clean = train_all(
            [
                spec("digits-mlp", f"{kind}:2", inject=faults, at=1, **options),
                spec("digits-mlp", f"{kind}:2", **options),
            ]
        )
        assert struck.losses[:2] == clean.losses[:2]
        assert struck.losses[2] != clean.losses[2]
        assert all(event["equal"] for event in struck.of("replicas"))
        (told,) = struck.of("struck")
        assert (told["step"], told["faults"], told["elements"]) == (1, 4, 4 if kind == "fsdp" else 8)
        digests.add(struck.state_digest)
    assert len(digests) == 1


@pytest.mark.parametrize(("layout", "second"), [("ddp:2", 1), ("hooks:2", 1), ("ddp:2+pipeline:2", 2)])
def test_a_summed_gradient_struck_on_one_replica_makes_it_drift_and_a_local_one_does_not(
    layout: str, second: int
) -> None:
    """The sum carries a local one to every replica. second: the rank that holds fc1 for the second replica."""
    options: dict[str, Any] = {"steps": 2, "at": 0, "probe_every": 1}
    clean, summed, local, other = train_all(
        [
            spec("digits-mlp", layout, steps=2, probe_every=1),
            spec("digits-mlp", layout, inject=gradient_faults("gradient"), reach=f"rank:{second}", **options),
            spec("digits-mlp", layout, inject=gradient_faults("local-gradient"), reach=f"rank:{second}", **options),
            spec("digits-mlp", layout, inject=gradient_faults("local-gradient"), reach="rank:0", **options),
        ]
    )
    assert [event["equal"] for event in summed.of("replicas")] == [False, False]
    for run in (local, other):
        assert [event["equal"] for event in run.of("replicas")] == [True, True]
        assert run.of("struck")[0]["elements"] == 4
    assert [list(run.of("struck")[0]["ranks"]) for run in (summed, local, other)] == [[second], [second], [0]]
    assert len({run.state_digest for run in (clean, local, other)}) == 3


@pytest.mark.parametrize("layout", ["single", "ddp:2", "ddp:3", "hooks:2", "tensor:2", "fsdp:2", "fsdp:2+tensor:2"])
def test_signs_of_all_local_gradients_are_the_sign_of_their_sum(layout: str) -> None:
    """-a + -b = -(a + b) to the bit. Before the sum, FSDP's ranks have gradients of whole parameters, too."""
    summed, local = train_all(
        [
            spec("digits-mlp", layout, steps=2, at=1, inject=gradient_faults(target))
            for target in ("gradient", "local-gradient")
        ]
    )
    assert summed.digests == local.digests
    if "fsdp" in layout:
        assert [event["elements"] for run in (summed, local) for event in run.of("struck")] == [4, 8]
    else:
        assert summed.of("struck") == local.of("struck")


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", ["ddp", "hooks", "fsdp"])
def test_a_local_gradient_struck_on_one_rank_enters_the_sum_as_it_is(tmp_path: Path, kind: str, at: int) -> None:
    """By hand: the second rank's share of the batch alone gives another sign for the elements of the plan."""
    faults = faults_of({**WHERE, "bits": "sign", "target": "local-gradient"})
    options: dict[str, Any] = {"steps": at + 1, "save": tmp_path / "run"}
    before, run = train_all(
        [
            spec("digits-mlp", f"{kind}:2", steps=at, save=tmp_path / "before"),
            spec("digits-mlp", f"{kind}:2", inject=faults, at=at, reach="rank:1", **options),
        ]
    )
    clean, struck = load_file(before.files[0]), load_file(run.files[0])
    sums = {name: sum(parts) for name, parts in halves_by_hand(clean, at).items()}
    flips = planned(tmp_path, sums)
    assert len({name for name, _ in flips}) > 1
    first, second = ({name: parts[half] for name, parts in halves_by_hand(clean, at).items()} for half in (0, 1))
    for name, flat in flips:
        second[name].reshape(-1)[flat] *= -1
    for name in sums:
        momentum = f"optimizer.{name.removeprefix('gradient.')}.momentum_buffer"
        past = numpy.float32(0.9) * clean[momentum] if at else 0
        assert (past + (first[name] + second[name])).tobytes() == struck[momentum].tobytes(), name
    assert run.of("struck") == [{"step": at, "reach": "rank:1", "faults": 40, "elements": 40, "ranks": (1,)}]


def halves_by_hand(state: dict[str, Any], step: int) -> dict[str, list[Any]]:
    """The gradients of half the mean loss of each half of a batch, by plain PyTorch on one thread."""
    recipe = recipes.get("digits-mlp")
    module, data = recipe.model(), recipe.data(None)
    module.load_state_dict({name[6:]: torch.tensor(array) for name, array in state.items() if name[:6] == "model."})
    batch = seeds.batch_order(3, 0, len(data.train_targets))[step * 64 : step * 64 + 64]
    found: dict[str, list[Any]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have
    for half in batch.split(32):
        loss = nn.functional.cross_entropy(module(data.train_features[half]), data.train_targets[half]) * 0.5
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True):
            found.setdefault(f"gradient.{name}", []).append(gradient.numpy())
    torch.set_num_threads(threads)
    return found


def first_gradients(folder: Path, layout: str, **options: Any) -> tuple[Run, dict[str, Any], dict[str, Any]]:
    """The summed gradients of the first step, as SGD's momentum has them after it: of a clean and of a struck run."""
    clean, struck = train_all(
        [
            spec("digits-mlp", layout, steps=1, save=folder / "clean"),
            spec("digits-mlp", layout, steps=1, save=folder / "struck", at=0, **options),
        ]
    )
    both = [
        {name: array for name, array in load_file(run.files[0]).items() if name.endswith("momentum_buffer")}
        for run in (clean, struck)
    ]
    return struck, both[0], both[1]


WHERE: dict[str, Any] = {"layer": ["gradient.fc*"], "count": 40, "seed": 3}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_summed_gradients_are_struck_where_the_plan_says_and_nowhere_else(tmp_path: Path, layout: str) -> None:
    """Signs of the elements that a plan over the whole model names, whichever ranks hold them."""
    faults = faults_of({**WHERE, "bits": "sign", "target": "gradient"})
    run, before, after = first_gradients(tmp_path, layout, inject=faults)
    expected = {name: array.copy() for name, array in before.items()}
    for name, flat in planned(tmp_path, before):
        expected[f"optimizer.{name.removeprefix('gradient.')}.momentum_buffer"].reshape(-1)[flat] *= -1
    assert {name: array.tobytes() for name, array in after.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
    (told,) = run.of("struck")
    replicas = next((int(part[-1]) for part in layout.split("+") if part.startswith(("ddp", "hooks"))), 1)
    assert told["faults"] == 40
    if "tensor" not in layout:  # there each rank has a copy of some
        assert told["elements"] == 40 * replicas


def planned(folder: Path, gradients: dict[str, Any], bits: str = "sign") -> list[tuple[str, int]]:
    """The elements of a draw from a file of zeros of the gradients' names and shapes."""
    zeros = {
        name.replace("optimizer.", "gradient.").removesuffix(".momentum_buffer"): numpy.zeros_like(array)
        for name, array in gradients.items()
    }
    save_file(zeros, folder / "zeros.safetensors")
    model = flipper.FaultModel(layers=WHERE["layer"], bits=bits, count=WHERE["count"])
    plan = flipper.draw(folder / "zeros.safetensors", model, seed=WHERE["seed"])
    return [(fault.tensor, fault.flat) for fault in plan]


@pytest.mark.parametrize("reach", ["all", "one"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "pipeline" in layout])
def test_the_first_micro_batchs_gradients_are_struck_in_a_pipeline(tmp_path: Path, layout: str, reach: str) -> None:
    """Where the plan says; an exponent's first bit changes zeros, too, and the sum with the other micro-batches'."""
    faults = faults_of({**WHERE, "bits": "exponent-msb", "target": "local-gradient"})
    run, before, after = first_gradients(tmp_path, layout, inject=faults, reach=reach)
    expected = planned(tmp_path, before, "exponent-msb")
    differing = [
        (f"gradient.{name.removeprefix('optimizer.').removesuffix('.momentum_buffer')}", int(flat))
        for name, array in before.items()
        for flat in numpy.flatnonzero(array != after[name])
    ]
    assert len({name for name, _ in expected}) > 1
    assert sorted(differing) == sorted(expected)
    assert run.of("struck")[0]["elements"] == 40 * (2 if "ddp" in layout and reach == "all" else 1)


@pytest.mark.parametrize(
    ("layout", "table", "message"),
    [
        ("ddp:2", {"finite": True}, "no finite, max_abs, direction or scale there"),
        ("fsdp:2", {"direction": "0to1"}, "no finite, max_abs, direction or scale there"),
        ("single", {"effect": "scale:2"}, "no finite, max_abs, direction or scale there"),
    ],
)
def test_local_gradients_are_refused_where_they_cannot_be_struck(
    layout: str, table: dict[str, Any], message: str
) -> None:
    faults = faults_of({"layer": ["gradient.fc1.weight"], "count": 1, "seed": 2, "target": "local-gradient", **table})
    with pytest.raises(UsageError) as caught:
        train(spec("digits-mlp", layout, steps=1, at=0, inject=faults))
    assert message in str(caught.value)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and the one line on stderr of `flipper train digits-mlp`."""
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits-mlp", "--seed", "1", "--steps", "2", "-q", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flipper: error: ")
    assert err.count("\n") == 1
    return int(ended.value.code or 0), err.removeprefix("flipper: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count = 1\nseed = 1\nlayers = ['fc1']\ncuont = 3", "no option 'cuont'; known: seed, target, "),
        ("count = 1", "the table needs a seed, 0 to 2**64 - 1, not None"),
        ("seed = -1", "the table needs a seed, 0 to 2**64 - 1, not -1"),
        ("seed = true", "the table needs a seed, 0 to 2**64 - 1, not True"),
        ("seed = 1\ntarget = 'weights'", "no target 'weights'; known: state, gradient, local-gradient"),
        ("seed 1", "neither a manifest nor TOML: "),
        (f"seed = {'[' * 5000}", "neither a manifest nor TOML: its lists or tables nest too deep"),
        ("seed = 1\nbits = 7", "--bits: 7 is not text"),
        ("seed = 1\nlayer = 3", "layer must be a text or a list of texts, not 3"),
        ("seed = 1\ndtype = [3]", "dtype must be a text or a list of texts, not [3]"),
        ("seed = 1\nspread = 'weighted'\nweight = 3", "weight must be a table of numbers, not 3"),
        ("seed = 1\nfield_weight = 3", "field_weight must be a table of numbers, not 3"),
        ("seed = 1\neffect = 1", "effect must be a text, not 1"),
        ("seed = 1\nfinite = 'yes'", "finite must be true or false, not 'yes'"),
        ("seed = 1\ncount = 'many'", "--count: 'many' is not a natural number"),
        ("seed = 1\ncount = 1\nber = 0.1", "give exactly one amount"),
        ("seed = 1\nfield_weight = 'sign'", "field_weight: 'sign' is not of the form NAME=WEIGHT"),
        ("faults = 3", "faults is no table of options"),
        ("", "the table needs a seed"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_by_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    code, line = command(capsys, "--inject", path, "--at", 0)
    assert code == 2
    assert line.startswith(f"--inject: {path}: ")
    assert message in line


def test_a_faults_file_that_cannot_be_read_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.json").write_text(json.dumps({"schema": "other"}))
    for name, code, message in (
        ("bytes", 2, f"--inject {tmp_path}/bytes is no text in UTF-8: byte 0 can't be read"),
        (".", 2, f"--inject {tmp_path} can't be read: Is a directory"),
        ("other.json", 1, "other.json is no manifest: its schema is not flipper-manifest/1"),
    ):
        got, line = command(capsys, "--inject", tmp_path / name, "--at", 0)
        assert got == code
        assert message in line


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ("layer = ['fc1']", ["--at", 2], "--at 2: this run can be struck after the steps 0 to 1"),
        ("layer = ['fc1']", [], "--inject and --at go together"),
        ("layer = ['fc1']", ["--at", 0, "--reach", "two"], "--reach: 'two' is none of all, one, rank:R"),
        ("layer = ['fc1']", ["--at", 0, "--reach", "rank:1"], "--reach: single has no rank 1; its ranks are 0 to 0"),
        ("layer = ['optimizer.fc1.weight']", ["--at", 0], "optimizer.fc1.weight"),
        ("layer = ['fc9']", ["--at", 0, "--parallel", "fsdp:2"], "fc9"),
        (
            "layer = ['fc1']\ntarget = 'gradient'",
            ["--at", 0],
            "--layer 'fc1' matches no tensor; the names are like gradient.fc1",
        ),
    ],
)
def test_a_strike_that_this_run_has_no_place_for_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: str, options: list[object], message: str
) -> None:
    (tmp_path / "faults.toml").write_text(f"seed = 1\n{table}\n")
    code, line = command(capsys, "--inject", tmp_path / "faults.toml", *options)
    assert code == 2
    assert message in line


@pytest.mark.parametrize("layout", ["single", "fsdp:2", "pipeline:2"])
def test_a_manifest_of_other_tensors_is_refused_before_anything_is_struck(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, layout: str
) -> None:
    """Another dtype, another shape, and a tensor that is not live yet."""
    (start,) = train_all([spec("digits-mlp", steps=1, save=tmp_path)])
    arrays = load_file(start.files[0])
    tensors = {
        "model.fc1.bias": (arrays["model.fc1.bias"].astype("f8"), "is float32[64] in this run and float64[64] among"),
        "model.fc2.bias": (numpy.zeros(31, "f4"), "is float32[32] in this run and float32[31] among"),
        "optimizer.fc1.bias.momentum_buffer": (numpy.zeros(64, "f4"), "is not live in this run at this step"),
    }
    for name, (array, message) in tensors.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({name: array}, path)
        (folder := tmp_path / "struck").mkdir(exist_ok=True)
        struck = altered(path, {"layer": [name], "count": 1, "bits": "sign", "seed": 1}, folder)
        where = ["--inject", f"{struck}.flipper.json", "--at", 0, "--parallel", layout]
        assert command(capsys, *where)[0] == 1
        assert f"{name} {message}" in command(capsys, *where)[1]
