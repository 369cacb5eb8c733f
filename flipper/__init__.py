"""flipper: flip bits in deep-learning checkpoints and measure what they do to training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from flipper.checkpoints import Checkpoint as Checkpoint
    from flipper.checkpoints import open_checkpoint as open
    from flipper.checkpoints.convert import convert as convert
    from flipper.errors import CheckpointError as CheckpointError
    from flipper.errors import FlipperError as FlipperError
    from flipper.faults.draw import draw as draw
    from flipper.faults.model import FaultModel as FaultModel
    from flipper.faults.plan import FaultPlan as FaultPlan
    from flipper.injection.inject import inject as inject
    from flipper.injection.manifest import Manifest as Manifest
    from flipper.injection.manifest import read_manifest as read_manifest
    from flipper.injection.memory import strike as strike
    from flipper.injection.undo import undo as undo
    from flipper.injection.verify import verify as verify

    open = open_checkpoint

__version__ = "0.1.0"

_PUBLIC: Final = {
    "Checkpoint": "flipper.checkpoints:Checkpoint",
    "CheckpointError": "flipper.errors:CheckpointError",
    "FaultModel": "flipper.faults.model:FaultModel",
    "FaultPlan": "flipper.faults.plan:FaultPlan",
    "FlipperError": "flipper.errors:FlipperError",
    "Manifest": "flipper.injection.manifest:Manifest",
    "convert": "flipper.checkpoints.convert:convert",
    "draw": "flipper.faults.draw:draw",
    "inject": "flipper.injection.inject:inject",
    "open": "flipper.checkpoints:open_checkpoint",
    "read_manifest": "flipper.injection.manifest:read_manifest",
    "strike": "flipper.injection.memory:strike",
    "undo": "flipper.injection.undo:undo",
    "verify": "flipper.injection.verify:verify",
}
"""Public name -> where it lives; imported at first use, so that `import flipper` costs nothing."""


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'flipper' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
