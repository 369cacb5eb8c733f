"""What the commands of `flipper campaign` share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.campaigns.folder import Campaign


class NamedPath(click.Path):
    """A path that has a name: an empty one, as of a shell's variable that isn't set, would be the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; click's own error, as of other paths, where the name is empty."""
        if not os.fspath(value):
            self.fail("the name is empty; give a path, which is . for the working folder", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = NamedPath(path_type=Path)
SPEC_OR_FOLDER = click.argument("where", metavar="SPEC-OR-FOLDER", type=FOLDER)
SET = click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Replace a key: axes.count=1,10; repeatable."
)  # fmt: skip
OUT = click.option("--out", type=FOLDER, metavar="FOLDER", help="Default: the spec's name.")


def shard_option(text: str | None) -> tuple[int, int] | None:
    """I/N as two numbers; raises UsageError."""
    if text is None:
        return None
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise UsageError(f"--shard {text!r} is not of the form I/N with 1 <= I <= N, such as 3/8")
    return int(first), int(second)


def existing(where: Path) -> Campaign:
    """The campaign of a folder, or of the folder that a spec's name stands for; raises UsageError."""
    from flipper.campaigns.folder import open_campaign
    from flipper.campaigns.spec import read_spec

    if where.is_dir():
        return open_campaign(where)
    return open_campaign(Path(read_spec(where).name))


def asked(where: Path, out: Path | None, changes: Sequence[str]) -> Campaign:
    """The campaign that a spec asks for, settled in its folder; a folder alone means what it says itself."""
    from flipper.campaigns.folder import campaign_of, open_campaign

    if where.is_dir():
        if changes or out is not None:
            raise UsageError("--set and --out go with a SPEC; a folder says itself what it is")
        return open_campaign(where)
    return campaign_of(where, out, changes)
