"""flipper: flip bits in deep-learning checkpoints and measure what they do to training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from flipper.checkpoints import Checkpoint
    from flipper.checkpoints import open_checkpoint as open
    from flipper.checkpoints.convert import convert
    from flipper.errors import CheckpointError, FlipperError
    from flipper.faults.draw import draw
    from flipper.faults.model import FaultModel
    from flipper.faults.plan import FaultPlan
    from flipper.injection.inject import inject
    from flipper.injection.manifest import Manifest, read_manifest
    from flipper.injection.memory import strike
    from flipper.injection.undo import undo
    from flipper.injection.verify import verify

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "FaultModel",
    "FaultPlan",
    "FlipperError",
    "Manifest",
    "convert",
    "draw",
    "inject",
    "open",
    "read_manifest",
    "strike",
    "undo",
    "verify",
]

__version__ = "0.1.0"

_HOMES: Final = {
    "flipper.checkpoints": ("Checkpoint", "open_checkpoint"),
    "flipper.checkpoints.convert": ("convert",),
    "flipper.errors": ("CheckpointError", "FlipperError"),
    "flipper.faults.draw": ("draw",),
    "flipper.faults.model": ("FaultModel",),
    "flipper.faults.plan": ("FaultPlan",),
    "flipper.injection.inject": ("inject",),
    "flipper.injection.manifest": ("Manifest", "read_manifest"),
    "flipper.injection.memory": ("strike",),
    "flipper.injection.undo": ("undo",),
    "flipper.injection.verify": ("verify",),
}
"""Module -> its public names; imported at first use, so that `import flipper` costs nothing."""

_PUBLIC: Final = {name.removesuffix("_checkpoint"): (home, name) for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flipper' has no attribute {name!r}")
    home, attribute = _PUBLIC[name]
    return getattr(import_module(home), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
