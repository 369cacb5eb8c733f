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
from flipper.checkpoints.structure import walk
from flipper.checkpoints.tensor import Tensor
from flipper.checkpoints.tree import Leaf, Opaque, Tree
from flipper.errors import CheckpointError, UsageError

BLOCK_BYTES = 4 << 20
"""Bytes of one block of a tensor that lies in one run."""

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
        data = cls(dtype, shape, lambda: (buffer,))
        seen = memoryview(buffer).nbytes
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

    def leaves(self) -> Iterator[tuple[tuple[Any, ...], Leaf]]:
        """The leaves with the keys that lead to them."""
        for keys, node in walk(self.tree):
            if isinstance(node, Leaf):
                yield keys, node

    def owner(self, name: str) -> str:
        """The name in `tensors` of a name or alias."""
        return self.aliases.get(name, name)


def contents_of(checkpoint: Checkpoint, drop: bool = False) -> Contents:
    """What `checkpoint` holds; its data is read when it is written, a block at a time.

    drop: leave out what can't be carried (objects of foreign classes, tensors without plain numbers) instead of
    raising UsageError.
    """
    _check_names(checkpoint)
    carried = [tensor for tensor in checkpoint.tensors if tensor.supported and _whole(tensor)]
    tensors = {tensor.name: _data(checkpoint, tensor) for tensor in carried}
    aliases = {alias: tensor.name for tensor in carried for alias in tensor.aliases}
    tree, lost = _prune(checkpoint.tree(), tensors.keys() | aliases.keys())
    lost += [f"{tensor.name}: {_why(tensor)}" for tensor in checkpoint.tensors if tensor.name not in tensors]
    if lost and not drop:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(f"{checkpoint.path}: {lost[0]}{more}; --drop-unsupported leaves out what can't be carried")
    return Contents(_complete(tree, tensors, aliases), tensors, aliases, tuple(dict.fromkeys(lost)))


def _check_names(checkpoint: Checkpoint) -> None:
    """Two tensors of one name can't be told apart in another container."""
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        if tensor.name in seen:
            raise CheckpointError("unsupported-storage", f"{checkpoint.path}: two tensors are called {tensor.name}")
        seen.update(tensor.names)


def _whole(tensor: Tensor) -> bool:
    """Whether its bytes say everything; a quantised tensor's scale stands elsewhere."""
    return not tensor.dtype.startswith(("qint", "quint"))


def _why(tensor: Tensor) -> str:
    return tensor.place.reason or f"{tensor.dtype} has a scale that other formats have no place for"


def _data(checkpoint: Checkpoint, tensor: Tensor) -> TensorData:
    return TensorData(tensor.dtype, tensor.shape, lambda: _blocks(checkpoint, tensor))


def _blocks(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[Buffer]:
    start = tensor.place.offset
    if start is None or (getattr(tensor.place, "order", "little") == "big" and tensor.layout.itemsize > 1):
        for block in checkpoint.blocks(tensor):
            yield _little_endian(block, tensor.layout)
        return
    source = checkpoint.sources[tensor.place.file]
    for first in range(0, tensor.nbytes, BLOCK_BYTES):
        yield source.read(start + first, min(BLOCK_BYTES, tensor.nbytes - first))


def _little_endian(block: Bits, layout: BitLayout) -> bytes:
    if not layout.packed:
        return block.astype(f"<u{layout.itemsize}").tobytes()
    digits = (block[:, None] >> np.arange(layout.width, dtype=np.uint64)) & np.uint64(1)
    return np.packbits(digits.astype(np.uint8), bitorder="little").tobytes()


_GONE = object()


def _prune(tree: Tree, names: set[str]) -> tuple[Tree, list[str]]:
    """The tree without foreign objects and without leaves whose tensor isn't among `names`, and what these were.

    They vanish from a dict; in a list or tuple, where others would move up, None takes their place.
    """
    lost = []
    for keys, node in walk(tree):
        where = ".".join(map(str, keys)) or "the whole"
        if isinstance(node, Opaque):
            lost.append(f"{where} is a {node.name}, a class that flipper doesn't know")
    pruned = _without(tree, names)
    return ({} if pruned is _GONE else pruned), lost


def _without(node: Any, names: set[str]) -> Any:
    if isinstance(node, Opaque) or (isinstance(node, Leaf) and node.name not in names):
        return _GONE
    if isinstance(node, dict):
        kept = ((key, _without(value, names)) for key, value in node.items())
        return {key: value for key, value in kept if value is not _GONE}
    if isinstance(node, (list, tuple)):
        items = (_without(item, names) for item in node)
        return type(node)(None if item is _GONE else item for item in items)
    return node


def _complete(tree: Tree, tensors: Mapping[str, TensorData], aliases: Mapping[str, str]) -> Tree:
    """The tree with every tensor in it: those that stood inside foreign objects come last, under their full names."""
    reached = {node.name for _, node in walk(tree) if isinstance(node, Leaf)}
    missing = [name for name in (*tensors, *aliases) if name not in reached]
    if not missing:
        return tree
    if not isinstance(tree, dict) or any(name in tree for name in missing):
        return {name: Leaf(name) for name in (*tensors, *aliases)}
    return {**tree, **{name: Leaf(name) for name in missing}}
