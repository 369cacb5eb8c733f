"""The `flip` fixture, as a project that uses it in its own tests sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SHARDED = Path(__file__).parent.parent / "sample_checkpoints" / "digits-cnn-sharded"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a checkpoint `model.safetensors` of two float32 tensors, all zero."""
    header = json.dumps(
        {
            "layer.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            "layer.bias": {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = pytester.path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    return pytester


def run(project: pytest.Pytester, body: str) -> None:
    """Run one test with this body in the project; it has to pass."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    project.makepyfile(f"from pathlib import Path\nimport pytest\n\ndef test_it(flip, tmp_path):\n{lines}\n")
    result = project.runpytest_subprocess("-p", "no:cacheprovider", "-q")
    result.assert_outcomes(passed=1)


def test_the_copy_has_as_many_flips_as_asked_for_and_the_source_none(project: pytest.Pytester) -> None:
    before = (project.path / "model.safetensors").read_bytes()
    run(
        project,
        """
corrupted = flip("model.safetensors", bits="exponent", count=3, seed=1)
assert corrupted.name == "model.safetensors"
assert corrupted.is_relative_to(tmp_path)
old, new = Path("model.safetensors").read_bytes(), corrupted.read_bytes()
assert len(old) == len(new)
xor = int.from_bytes(old, "little") ^ int.from_bytes(new, "little")
assert xor.bit_count() == 3
assert all(23 <= bit % 32 < 31 for bit in range(8 * len(old)) if xor >> bit & 1)
""",
    )
    assert (project.path / "model.safetensors").read_bytes() == before


def test_the_manifest_tells_what_was_struck(project: pytest.Pytester) -> None:
    run(
        project,
        """
corrupted = flip("model.safetensors", layers=["layer.bias"], bits="30", count=1)
[fault] = flip.manifest(corrupted).faults
assert fault["tensor"] == "layer.bias"
assert fault["bits"] == [30]
assert (fault["before_value"], fault["after_value"]) == (0.0, 2.0)
with pytest.raises(KeyError):
    flip.manifest("model.safetensors")
""",
    )


def test_without_a_seed_every_copy_is_the_same_and_other_seeds_differ(project: pytest.Pytester) -> None:
    run(
        project,
        """
first, second = flip("model.safetensors", count=5), flip("model.safetensors", count=5)
other = flip("model.safetensors", count=5, seed=1)
assert len({first, second, other}) == 3
assert first.read_bytes() == second.read_bytes() != other.read_bytes()
""",
    )


def test_a_checkpoint_in_tmp_path_stays_as_it_is(project: pytest.Pytester) -> None:
    run(
        project,
        """
mine = tmp_path / "model.safetensors"
mine.write_bytes(Path("model.safetensors").read_bytes())
assert flip(mine).read_bytes() != mine.read_bytes() == Path("model.safetensors").read_bytes()
""",
    )


def test_options_that_make_no_sense_raise_what_flipper_raises(project: pytest.Pytester) -> None:
    run(
        project,
        """
from flipper.errors import FlipperError
with pytest.raises(FlipperError, match="exactly one amount"):
    flip("model.safetensors", count=1, ber=0.5)
with pytest.raises(FlipperError, match="does not exist"):
    flip("nothing.safetensors")
with pytest.raises(FlipperError, match="no option nonsense; It takes seed, layers"):
    flip("model.safetensors", nonsense=3)
for name in ("layers", "dtypes", "roles", "weights", "bits"):
    with pytest.raises(FlipperError, match=f"no option {name[:-1]}; did you mean {name}[?]"):
        flip("model.safetensors", **{name[:-1]: "x"})
""",
    )


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = "import pytest, sys; before = set(sys.modules); import flipper.pytest_plugin; " + (
        "print(*sorted(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["flipper", "flipper.pytest_plugin"]


def test_pytest_finds_the_fixture_by_itself(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--fixtures", "-q", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["flip -- *pytest_plugin.py*"])


def test_a_checkpoint_of_several_files_that_fills_tmp_path_is_copied_elsewhere(project: pytest.Pytester) -> None:
    run(
        project,
        f"""
import shutil
shutil.copytree({str(SHARDED)!r}, tmp_path, dirs_exist_ok=True)
names = sorted(path.name for path in tmp_path.iterdir())
corrupted = flip(tmp_path)
assert sorted(path.name for path in corrupted.iterdir()) == names
assert not corrupted.is_relative_to(tmp_path)
""",
    )
