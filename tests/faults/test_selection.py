"""Which tensors are selected: names, module prefixes, globs, expressions, exclusion, roles, dtypes, ties."""

from __future__ import annotations

import h5py
import pytest
import torch
from files_by_hand import numbers, write_safetensors, zeros

import flipper
from flipper.errors import NothingEligible, UsageError
from flipper.faults.draw import population_of
from flipper.faults.selection import Selection


def selected(path, *layers, **options):
    with flipper.open(path) as checkpoint:
        return [tensor.name for tensor in Selection(layers=layers, **options).apply(checkpoint.tensors)]


def named(path, *names):
    return write_safetensors(path / "m.safetensors", {name: zeros("F32", 1) for name in names})


def test_a_module_prefix_takes_the_module_and_no_longer_name(tmp_path):
    path = named(tmp_path, "conv1.weight", "conv1.bias", "conv10.weight", "conv1x", "my.conv1.weight")
    assert selected(path, "conv1") == ["conv1.bias", "conv1.weight"]


def test_a_name_takes_its_tensor_alone(tmp_path):
    path = named(tmp_path, "conv1.weight", "conv1.weight_norm", "conv1.weight.g")
    assert selected(path, "conv1.weight") == ["conv1.weight"]


def test_an_exact_name_wins_over_a_glob(tmp_path):
    path = named(tmp_path, "w*", "wide", "w")
    assert selected(path, "w*") == ["w*"]
    assert selected(path, "?") == ["w"]


def test_a_module_prefix_wins_over_a_glob(tmp_path):
    path = named(tmp_path, "layers[0].weight", "layers0", "layers[0]x")
    assert selected(path, "layers[0]") == ["layers[0].weight"]


def test_a_glob_is_over_the_whole_name_and_case_sensitive(tmp_path):
    names = ("layer1.0.weight", "layer1.0.bias", "layer1.1.Weight", "x.layer1.0.weight", "layer2.0.weight")
    path = named(tmp_path, *names)
    assert selected(path, "layer1.*.weight") == ["layer1.0.weight"]
    assert selected(path, "layer[12].?.weight") == ["layer1.0.weight", "layer2.0.weight"]
    assert selected(path, "*eight") == ["layer1.0.weight", "layer1.1.Weight", "layer2.0.weight", "x.layer1.0.weight"]
    with pytest.raises(UsageError):
        selected(path, "LAYER1")


def test_an_expression_fits_the_whole_name(tmp_path):
    path = named(tmp_path, "conv1.weight", "conv2.weight", "conv2.weights")
    assert selected(path, r"re:conv\d\.weight") == ["conv1.weight", "conv2.weight"]
    with pytest.raises(UsageError, match="matches no tensor"):
        selected(path, r"re:conv\d")


@pytest.mark.parametrize("pattern", ["re:(", "re:*", "re:a{99999999999999999999}"])
def test_what_is_no_expression_is_refused_by_name(tmp_path, pattern):
    with pytest.raises(UsageError, match="not a regular expression"):
        selected(named(tmp_path, "a"), pattern)


@pytest.mark.parametrize("prefix", ["model.", "module.", "state_dict.", "state_dict.model.", "module.model.module."])
def test_leading_wrappers_may_be_left_out_one_or_several(tmp_path, prefix):
    path = named(tmp_path, prefix + "conv1.weight", "other.conv1.weight")
    full = prefix + "conv1.weight"
    for pattern in ("conv1", "conv1.weight", "conv1.w*", r"re:conv1\.w.+", prefix + "conv1", full, prefix[:-1]):
        assert selected(path, pattern) == [full]
    assert selected(path, "*conv1.weight") == sorted([full, "other.conv1.weight"])


def test_only_leading_wrappers_may_be_left_out(tmp_path):
    path = named(tmp_path, "my.model.conv1.weight", "models.conv2.weight")
    for pattern in ("conv1", "conv2"):
        with pytest.raises(UsageError, match="matches no tensor"):
            selected(path, pattern)


def test_several_patterns_add_up_and_excluded_ones_are_taken_away(tmp_path):
    path = named(tmp_path, "a.weight", "a.bias", "b.weight", "b.bias", "c.weight")
    assert selected(path, "a", "b.weight") == ["a.bias", "a.weight", "b.weight"]
    assert selected(path, "a", "b", excluded=("*.bias",)) == ["a.weight", "b.weight"]
    assert selected(path, excluded=("a", "b")) == ["c.weight"]
    assert selected(path) == ["a.bias", "a.weight", "b.bias", "b.weight", "c.weight"]


@pytest.mark.parametrize("options", [{"layers": ["conv2"]}, {"exclude": ["conv2"]}, {"layers": ["conv1", "conv2"]}])
def test_a_pattern_that_matches_nothing_is_wrong_usage_and_close_names_are_shown(tmp_path, options):
    path = named(tmp_path, "conv1.weight", "fc.weight")
    with flipper.open(path) as checkpoint, pytest.raises(UsageError, match=r"'conv2' matches no tensor.*conv1") as seen:
        flipper.draw(checkpoint, flipper.FaultModel(**options), seed=1)
    assert seen.value.exit_code == 2


def test_where_no_name_is_close_some_names_are_shown(tmp_path):
    with pytest.raises(UsageError, match=r"names are like conv1\.weight, fc\.weight"):
        selected(named(tmp_path, "conv1.weight", "fc.weight"), "zzzzzzzz")


def test_names_in_hdf5_are_paths_and_are_compared_as_they_are(tmp_path):
    with h5py.File(tmp_path / "m.h5", "w") as file:
        for name in ("conv1/weight", "conv10/weight", "conv1.bias"):
            file[name] = [1.0]
    assert selected(tmp_path / "m.h5", "conv1") == ["conv1.bias", "conv1/weight"]
    assert selected(tmp_path / "m.h5", "conv1/weight") == ["conv1/weight"]
    assert selected(tmp_path / "m.h5", "*/weight") == ["conv1/weight", "conv10/weight"]
    with pytest.raises(UsageError, match="matches no tensor"):
        selected(tmp_path / "m.h5", "conv1.weight")


def test_roles_and_dtypes_narrow_what_patterns_select(tmp_path):
    path = write_safetensors(
        tmp_path / "m.safetensors",
        {
            "model.bn.weight": zeros("F32", 1),
            "model.bn.running_mean": zeros("F16", 1),
            "model.bn.num_batches_tracked": zeros("I64", 1),
            "optimizer.bn.weight.exp_avg": zeros("F32", 1),
            "progress.step": zeros("I64", 1),
        },
    )
    assert selected(path, roles=("parameter",)) == ["model.bn.weight"]
    assert selected(path, "bn", roles=("buffer",)) == ["model.bn.num_batches_tracked", "model.bn.running_mean"]
    assert selected(path, roles=("optimizer", "other")) == ["optimizer.bn.weight.exp_avg", "progress.step"]
    assert selected(path, dtypes=("int64",)) == ["model.bn.num_batches_tracked", "progress.step"]
    assert selected(path, roles=("buffer",), dtypes=("float16",)) == ["model.bn.running_mean"]


@pytest.mark.parametrize("options", [{"roles": ["weights"]}, {"dtypes": ["float7"]}, {"dtypes": ["FLOAT32"]}])
def test_unknown_roles_and_dtypes_are_refused_with_the_known_ones(options):
    with pytest.raises(UsageError, match="known: "):
        flipper.FaultModel(**options)


def test_integers_and_bools_are_eligible_only_when_their_dtype_is_named(tmp_path):
    tensors = {"f": zeros("F32", 2), "h": zeros("BF16", 2), "i": zeros("I8", 2), "b": zeros("BOOL", 2)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    with flipper.open(path) as checkpoint:
        def names(**options):
            return [s.tensor.name for s in population_of(checkpoint, flipper.FaultModel(**options)).segments]

        assert names() == ["f", "h"]
        assert names(dtypes=["int8"]) == ["i"]
        assert names(dtypes=["float32", "bool"]) == ["b", "f"]
        assert names(layers=["*"]) == ["f", "h"]
        with pytest.raises(NothingEligible, match=r"of dtype int8.*see --dtype"):
            flipper.draw(checkpoint, flipper.FaultModel(layers=["i"]), seed=1)


@pytest.fixture(params=["torch", "safetensors"])
def tied(request, tmp_path):
    """encoder.weight and decoder.weight are one tensor."""
    if request.param == "torch":
        weight = torch.ones(3)
        torch.save({"encoder.weight": weight, "decoder.weight": weight, "x.bias": torch.ones(1)}, tmp_path / "m.pt")
        return tmp_path / "m.pt"
    return write_safetensors(
        tmp_path / "m.safetensors",
        {"decoder.weight": numbers([1.0] * 3), "x.bias": numbers([1.0])},
        {"encoder.weight": "decoder.weight"},
    )


def test_a_tied_tensor_is_selected_or_excluded_by_any_of_its_names(tied):
    for alias in ("encoder", "decoder", "encoder.weight", "enc*"):
        assert selected(tied, alias) == ["decoder.weight"]
        assert selected(tied, excluded=(alias,)) == ["x.bias"]
    with pytest.raises(UsageError):
        selected(tied, "weight")


def test_a_tied_tensor_counts_once(tied):
    with flipper.open(tied) as checkpoint:
        record = population_of(checkpoint, flipper.FaultModel()).record()
    assert record == {"tensors": 2, "elements": 4, "bits": 128, "bits_by_role": {"parameter": 128}}


def test_the_weight_of_a_layer_is_given_by_its_tensors_or_by_its_own_name(tmp_path):
    path = named(tmp_path, "conv1.weight", "conv1.bias", "conv2.weight", "block.conv.weight", "head")

    def struck(weights):
        with flipper.open(path) as checkpoint:
            model = flipper.FaultModel(count=30, spread="weighted", weights=weights)
            return {stratum.name for stratum in flipper.draw(checkpoint, model, seed=1).strata if stratum.faults}

    assert struck({"conv1": 1}) == {"conv1"}
    assert struck({"conv?": 1}) == {"conv1", "conv2"}
    assert struck({"block": 1}) == {"block.conv"}
    assert struck({"*.weight": 1, "conv1": 0}) == {"conv2", "block.conv"}
    assert struck({"conv1": 0, "*.weight": 1}) == {"conv1", "conv2", "block.conv"}
    assert struck({"head": 1}) == {"head"}
    with pytest.raises(UsageError, match="--weight 'conv3' matches no selected layer; close names: "):
        struck({"conv3": 1})
