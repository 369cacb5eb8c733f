"""Files that flipper doesn't read: one line that says what they are, not only what they are not."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_makers import saved_bytes

from flipper.checkpoints import open_checkpoint
from flipper.errors import CheckpointError


def exported() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(3, 2), (torch.ones(1, 3),)), buffer)
    return buffer.getvalue()


def npz(save) -> bytes:
    buffer = io.BytesIO()
    save(buffer, w=np.ones(3))
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("storages")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    return buffer.getvalue()


def plain_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello.txt", "x")
    return buffer.getvalue()


KINDS = {
    "torch.export (.pt2)": exported,
    "NumPy archive (.npz)": lambda: npz(np.savez),
    "a NumPy archive": lambda: npz(np.savez_compressed),
    "NumPy array (.npy)": npy,
    "tar archive": tar,
    "gzip; unpack it": lambda: gzip.compress(saved_bytes({"w": torch.ones(2)})),
    "bzip2; unpack it": lambda: bz2.compress(b"x"),
    "xz; unpack it": lambda: lzma.compress(b"x"),
    "GGUF": lambda: b"GGUF\3\0\0\0" + bytes(64),
    "git lfs pull": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "a pickle that torch.save didn't write": lambda: pickle.dumps({"w": [1.0]}),
    "zip archive without a data.pkl": plain_zip,
    "no checkpoint that flipper knows": lambda: b"hello",
    "no checkpoint that flipper knows; known": lambda: b"",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("told", KINDS)
def test_the_message_says_what_the_file_is(tmp_path: Path, told: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(KINDS[told]())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.reason == "foreign"
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
