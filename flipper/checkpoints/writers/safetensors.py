"""Write safetensors: a header, then the data; ties and the structure stand in `__metadata__`.

A tie is recorded as safetensors' own save_model does: alias -> name of the tensor that is stored. The structure stands
under `flipper_tree` (see structure.py). Tensors follow each other from the widest dtype to the narrowest, then by name,
as the library's own writer orders them, so that all are aligned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from flipper.checkpoints.safetensors import DTYPES, HEADER_LIMIT, STRUCTURE_KEY
from flipper.checkpoints.structure import encode
from flipper.checkpoints.writers.contents import Contents, TensorData
from flipper.errors import UsageError

CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


def write(contents: Contents, path: Path) -> None:
    """Write `contents` to the file `path`; raises UsageError, before it writes, for what the format can't hold."""
    order = sorted(contents.tensors, key=lambda name: (-contents.tensors[name].layout.width, name))
    head = _head(contents, order)
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            for block in contents.tensors[name].blocks():
                file.write(block)


def _head(contents: Contents, order: list[str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": _metadata(contents)}
    position = 0
    for name in order:
        data = contents.tensors[name]
        end = position + data.nbytes
        header[name] = {"dtype": _code(name, data), "shape": list(data.shape), "data_offsets": [position, end]}
        position = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("a tensor's name is no valid Unicode, which safetensors needs; try --to pytorch") from error
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise UsageError(f"the safetensors header would have {len(text)} bytes; the limit is {HEADER_LIMIT}")
    return len(text).to_bytes(8, "little") + text


def _metadata(contents: Contents) -> dict[str, str]:
    reserved = {"__metadata__"} & contents.tensors.keys() | {STRUCTURE_KEY} & contents.aliases.keys()
    if reserved:
        raise UsageError(f"safetensors can't hold a tensor called {reserved.pop()}; try --to pytorch")
    framework = {} if "pt" in contents.tensors else {"format": "pt"}  # transformers insists on this key
    return {**framework, **contents.aliases, STRUCTURE_KEY: encode(contents.tree)}


def _code(name: str, data: TensorData) -> str:
    code = CODES.get(data.dtype)
    if code is None:
        raise UsageError(f"{name} is {data.dtype}, which safetensors can't hold; try --to pytorch or --to hdf5")
    if data.elements * data.layout.components * data.layout.width % 8:
        raise UsageError(f"{name}: {data.elements} elements of {data.dtype} fill no whole bytes; try --to hdf5")
    return code
