"""A recipe that takes back what makes runs repeat to the bit is refused by the name of the setting."""

from pathlib import Path

import pytest

from flipper.errors import UsageError
from flipper.training.run import train
from flipper.training.spec import TrainSpec


@pytest.mark.parametrize(
    "setting",
    [
        "torch.set_num_threads(2)",
        "torch.use_deterministic_algorithms(False)",
        "torch.backends.cudnn.benchmark = True",
    ],
)
def test_a_setting_that_undoes_determinism_is_refused_by_name(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "import torch\n"
        "from flipper.training.recipes.digits import MLP\n"
        f"{setting}\n"
        'MINE = replace(MLP, name="mine")\n'
    )
    with pytest.raises(UsageError) as caught:
        train(TrainSpec(f"{file}:MINE", steps=1, seed=1))
    assert f"mine sets {setting}: runs would not repeat" in str(caught.value)
