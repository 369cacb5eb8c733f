"""torchscript: the zip archives of torch.jit.save: those of torch.save, with code and a second stream of constants."""

from __future__ import annotations

from flipper.checkpoints import pytorch
from flipper.checkpoints.archives import mentions
from flipper.checkpoints.pytorch import Contents, PyTorchFile
from flipper.checkpoints.source import Source


def sniff(source: Source) -> bool:
    """Whether it is a PyTorch zip file with constants.pkl and code beside data.pkl."""
    return pytorch.sniff(source) and mentions(source, b"constants.pkl")


class TorchScriptFile(PyTorchFile):
    """One TorchScript file; its tensor constants are called constants.0, constants.1, ..."""

    format = "torchscript"

    def _read(self) -> Contents:
        prefix = pytorch.find_prefix(self.archive)
        order = pytorch.byte_order(self.archive, prefix)
        main = pytorch.read(self.archive)
        constants = pytorch.read_stream(
            self.archive, f"{prefix}constants.pkl", f"{prefix}constants/", order, name="constants"
        )
        tree = main.tree if isinstance(main.tree, dict) else {"module": main.tree}
        if constants.tensors:
            tree = {**tree, "constants": constants.tree}
        return Contents(tree, main.tensors + constants.tensors, main.notes + constants.notes)
