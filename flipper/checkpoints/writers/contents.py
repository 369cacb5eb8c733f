"""Contents: what a checkpoint holds, ready to be written in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flipper import bits
from flipper.bits import BitLayout
from flipper.bits.layout import Bits
from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.output import PIECE
from flipper.checkpoints.structure import Keys, walk
from flipper.checkpoints.tensor import Tensor
from flipper.checkpoints.tree import Leaf, Opaque, Tree
from flipper.errors import CheckpointError, UsageError

MAX_UNFOLDING = 2000
"""Bytes of tensors for each byte of file, and at least 1 GiB; deflate's best is 1032."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TensorData:
    """One tensor to write.

    dtype: a name of flipper.bits. shape: in elements, packed dtypes unpacked.
    blocks: its bytes in pieces, row-major, little-endian, packed dtypes low bits first; each call begins anew.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Buffer]] = field(repr=False)

    @classmethod
    def from_bytes(cls, dtype: str, shape: tuple[int, ...], buffer: Buffer) -> TensorData:
        """A tensor that is in memory already: its bytes row-major and little-endian, not copied."""
        view = memoryview(buffer)
        octets = view.cast("B") if view.nbytes else b""
        seen = len(octets)
        data = cls(dtype, shape, lambda: (octets[first : first + PIECE] for first in range(0, seen, PIECE)))
        if seen != data.nbytes:
            raise ValueError(f"{dtype}{list(shape)} needs {data.nbytes} bytes, the buffer has {seen}")
        return data

    @property
    def layout(self) -> BitLayout:
        """What the bits of an element mean."""
        return bits.layout(self.dtype)

    @property
    def elements(self) -> int:
        """How many elements the shape holds; a complex one counts once."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes that the elements need, rounded up."""
        return (self.elements * self.layout.components * self.layout.width + 7) // 8

    def read(self) -> bytes:
        """All its bytes at once."""
        return b"".join(self.blocks())


@dataclass(frozen=True)
class Contents:
    """A tree whose leaves name tensors, and the tensors.

    tensors: by name, each set of tied names once. aliases: further name -> name in `tensors`.
    dropped: what the source had and this leaves out, in words for the user.
    """

    tree: Tree
    tensors: Mapping[str, TensorData]
    aliases: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def leaves(self) -> Iterator[tuple[Keys, Leaf]]:
        """The leaves with the keys that lead to them."""
        for keys, node in walk(self.tree):
            if isinstance(node, Leaf):
                yield keys, node

    def spelled(self, spell: Callable[[Keys], str]) -> Tree:
        """The tree such that a tensor's keys spell its name, for formats that have no other names.

        spell: the name that a reader makes of keys. A tensor whose name isn't spelled (HDF5 joins names by slashes)
        moves to the top, under its whole name.
        """
        found = {leaf.name: leaf for _, leaf in self.leaves()}
        wrong = {leaf.name for keys, leaf in self.leaves() if spell(keys) != leaf.name}
        if not wrong:
            return self.tree
        if all(isinstance(node, Leaf) for _, node in walk(self.tree)):
            return found
        return _complete(_without(self.tree, found.keys() - wrong), found)

    def owner(self, name: str) -> str:
        """The name in `tensors` of a name or alias."""
        return self.aliases.get(name, name)


def contents_of(checkpoint: Checkpoint, drop: bool = False) -> Contents:
    """What `checkpoint` holds; its data is read when it is written, a block at a time.

    drop: leave out what can't be carried (objects of foreign classes, tensors without plain numbers) instead of
    raising UsageError.
    """
    _check_names(checkpoint)
    _check_size(checkpoint)
    carried = [tensor for tensor in checkpoint.tensors if tensor.supported and _whole(tensor)]
    tensors = {tensor.name: data_of(checkpoint, tensor) for tensor in carried}
    # A reader takes the first of tied names for the tensor's own. Keras' layer names may come before the stored one,
    # and would then change which faults a seed draws; they are left out.
    aliases = {alias: tensor.name for tensor in carried for alias in tensor.aliases if alias > tensor.name}
    whole = checkpoint.tree()
    left = [tensor for tensor in checkpoint.tensors if tensor.name not in tensors]
    lost = _foreign(whole) + [f"{tensor.name}: {_why(tensor)}" for tensor in left]
    named = tensors.keys() | aliases.keys()
    lost += _missing(whole, named.union(*(tensor.names for tensor in left)))
    if lost and not drop:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(f"{checkpoint.path}: {lost[0]}{more}; --drop-unsupported leaves out what can't be carried")
    tree = _without(whole, named) if lost else whole
    return Contents(
        _complete(tree, {name: Leaf(name) for name in sorted(named)}), tensors, aliases, tuple(dict.fromkeys(lost))
    )


def _check_names(checkpoint: Checkpoint) -> None:
    """Two tensors of one name can't be told apart in another container."""
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        if tensor.name in seen:
            raise CheckpointError("unsupported-storage", f"{checkpoint.path}: two tensors are called {tensor.name}")
        seen.update(tensor.names)


def _check_size(checkpoint: Checkpoint) -> None:
    """A few bytes seen through strides of zero can claim any number of elements; no disk should be filled with them."""
    claimed = sum(tensor.nbytes for tensor in checkpoint.tensors)
    if claimed > max(MAX_UNFOLDING * checkpoint.size, 1 << 30):
        seen = f"its tensors claim {claimed} bytes in {checkpoint.size} bytes of file"
        raise CheckpointError("unsupported-storage", f"{checkpoint.path}: {seen}")


def _whole(tensor: Tensor) -> bool:
    """Whether its bytes say everything; a quantised tensor's scale stands elsewhere."""
    return not tensor.dtype.startswith(("qint", "quint"))


def _why(tensor: Tensor) -> str:
    return tensor.place.reason or f"{tensor.dtype} has a scale that other formats have no place for"


def data_of(checkpoint: Checkpoint, tensor: Tensor) -> TensorData:
    """A supported tensor of a checkpoint, read when it is written."""
    return TensorData(tensor.dtype, tensor.shape, lambda: _blocks(checkpoint, tensor))


def _blocks(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[Buffer]:
    start = tensor.place.offset
    if start is None or (getattr(tensor.place, "order", "little") == "big" and tensor.layout.itemsize > 1):
        for block in checkpoint.blocks(tensor):
            yield _little_endian(block, tensor.layout)
        return
    source = checkpoint.sources[tensor.place.file]
    for first in range(0, tensor.nbytes, PIECE):
        yield source.read(start + first, min(PIECE, tensor.nbytes - first))


def _little_endian(block: Bits, layout: BitLayout) -> bytes:
    if not layout.packed:
        return block.astype(f"<u{layout.itemsize}").tobytes()
    digits = (block[:, None] >> np.arange(layout.width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(digits.astype(np.uint8), bitorder="little").tobytes()


def _foreign(tree: Tree) -> list[str]:
    """The objects of foreign classes in a tree, in words."""
    found = []
    for keys, node in walk(tree):
        if isinstance(node, Opaque):
            where = ".".join(map(str, keys)) or "the whole"
            found.append(f"{where} is a {node.name}, a class that flipper doesn't know")
    return found


def _missing(tree: Tree, names: set[str]) -> list[str]:
    """The leaves that lead to no tensor, in words: another program took it away and left flipper's record."""
    leaves = (node.name for _, node in walk(tree) if isinstance(node, Leaf))
    return [f"the structure record names {name}, but there is no such tensor" for name in leaves if name not in names]


def _without(node: Any, names: set[str]) -> Any:
    """The tree without foreign objects and without leaves whose tensor isn't among `names`.

    They vanish from a dict; None takes their place in a list or tuple, where others would move up, and at the root.
    """
    if isinstance(node, dict):
        return {key: _without(value, names) for key, value in node.items() if not _gone(value, names)}
    if isinstance(node, (list, tuple)):
        return type(node)(_without(item, names) for item in node)
    return None if _gone(node, names) else node


def _gone(node: Any, names: set[str]) -> bool:
    return isinstance(node, Opaque) or (isinstance(node, Leaf) and node.name not in names)


def _complete(tree: Tree, leaves: dict[str, Leaf]) -> Tree:
    """The tree with every leaf in it: those that it lacks come last, at the top, under their full names.

    leaves: by name.
    """
    reached = {node.name for _, node in walk(tree) if isinstance(node, Leaf)}
    missing = {name: leaf for name, leaf in leaves.items() if name not in reached}
    if not missing:
        return tree
    if not isinstance(tree, dict) or missing.keys() & tree.keys():
        return leaves
    return {**tree, **missing}
