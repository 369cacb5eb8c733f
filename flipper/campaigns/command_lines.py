"""Command lines: the user's own training as [commands] gives it, a line for each layout, with places to fill in."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flipper.errors import UsageError

GIVEN: Final = ("checkpoint", "metrics", "output", "workdir", "seed")
"""What flipper puts into a line beside the values of axes."""

OF_A_RECIPE: Final = (
    "data_dir", "epochs", "steps", "evaluate_every", "probe_every", "detect", "checkpoint_format", "device",
)  # fmt: skip
"""Keys of [campaign] that a user's own command settles itself."""

_PLACE: Final = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
"""{{name}}, which stands for the text {name}, or a place to fill in. Other braces are left as they are."""


def places(line: str) -> tuple[str, ...]:
    """The names of the places in a line, each once, in order."""
    return tuple(dict.fromkeys(match[2] for match in _PLACE.finditer(line) if match[2]))


def settings(line: str, axes: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The axes that a line asks for, with their values as it gets them: its clean runs differ where these do."""
    names = (name for name in places(line) if name not in GIVEN and name != "parallel")
    return tuple((name, shown(axes[name])) for name in names)


def words(line: str, values: Mapping[str, str], folder: Path) -> list[str]:
    """The line split as a shell does, then filled in, so that a value is never split.

    folder: of the campaign file; a word that is the name of a file there becomes its full path, since the command runs
    in a folder of its own. Raises UsageError where quotes are not closed.
    """
    first, *rest = split(line)
    first = str(folder / first) if os.sep in first else first
    found = (first, *(_found(word, folder) for word in rest))
    return [_PLACE.sub(lambda match: _filled(match, values), word) for word in found]


def files_of(line: str, folder: Path) -> list[str]:
    """The files that a line names, as it names them: what is run from a file, and what it is told to read."""
    first, *rest = split(line)
    found = [*([first] if os.sep in first else []), *(word.rpartition("=")[2] for word in rest)]
    return [name for name in dict.fromkeys(found) if name and (folder / name).is_file()]


def split(line: str) -> list[str]:
    """The words of a line, as a shell splits them; nothing else of a shell is done. Raises UsageError."""
    try:
        found = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} can't be split into words: {str(error).lower()}") from error
    if not found:
        raise UsageError("the command line is empty")
    return found


def check_commands(
    campaign: Mapping[str, Any], commands: Mapping[str, str], axes: Iterable[str], metrics_file: bool
) -> None:
    """Whether the lines can be run. campaign: the other keys. axes: those that there are.

    metrics_file: whether {metrics} is where metrics are. Raises UsageError naming the command and what is wrong.
    """
    if other := next((key for key in OF_A_RECIPE if key in campaign), None):
        raise UsageError(f"campaign.{other} goes with a recipe; with [commands] the command line itself says it")
    for name, line in commands.items():
        if not name or "/" in name or name.startswith("."):
            raise UsageError(f"commands.{name}: a command's name is part of file names: no /, no leading dot")
        try:
            _check_line(line, dict.fromkeys((*GIVEN, *axes)), metrics_file)
        except UsageError as error:
            raise UsageError(f"commands.{name}: {error}") from error
    seeds = campaign.get("training_seeds", [])
    if len(seeds) > 1 and (fixed := [name for name, line in commands.items() if "seed" not in places(line)]):
        raise UsageError(
            f"campaign.training_seeds has {len(seeds)} seeds, and commands.{fixed[0]} does not use {{seed}}: "
            "its runs would all be the same"
        )


def _check_line(line: str, known: Iterable[str], metrics_file: bool) -> None:
    split(line)
    for place in places(line):
        if place not in known:
            listed = ", ".join(f"{{{each}}}" for each in known)
            raise UsageError(f"no placeholder {{{place}}}; known: {listed}; the text itself: {{{{{place}}}}}")
    if "checkpoint" not in places(line):
        raise UsageError("{checkpoint} is missing: where the command gets the file to resume from")
    if metrics_file and "metrics" not in places(line):
        raise UsageError(
            "{metrics} is missing: where the command is to write them; or set metrics.file to where it does, "
            'or metrics.format = "stdout"'
        )


def checkpoints_of(where: str, given: Any, here: Path | None) -> list[str]:
    """The checkpoints that paths and globs stand for, each once, as they were given; those of a glob in sorted order.

    where: for messages. here: what they are relative to; None takes them as they are, there or not. Flipper's own
    manifests beside them are left out of globs. Raises UsageError naming what isn't there.
    """
    found: list[str] = []
    for each in given if isinstance(given, list) else [given]:
        if not isinstance(each, str) or not each:
            raise UsageError(f"{where}: checkpoint must be a path or a glob, or a list of these, not {each!r}")
        if here is None:
            found.append(each)
            continue
        matches = [each] if os.path.exists(here / each) else sorted(glob.glob(each, root_dir=here, recursive=True))
        matches = [match for match in matches if not match.endswith((".flipper.json", ".flipper.npz"))]
        if not matches:
            raise UsageError(f"{where}: checkpoint {each!r} is not there; it is relative to the campaign file, {here}")
        found += [match for match in matches if match not in found]
    return found


def shown(value: Any) -> str:
    """An axis' value as a word: lists with commas, tables as JSON."""
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value))
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def missing_executable(word: str, folder: Path) -> str | None:
    """Why a first word, as `words` gives it, can't be run; None where it can."""
    if shutil.which(word) is not None:
        return None
    if os.sep in word:
        return f"{word} is not executable (chmod +x)" if os.path.isfile(word) else f"there is no file {word}"
    hint = f"; of {folder}, write ./{word}" if os.path.isfile(folder / word) else ""
    return f"there is no executable {word!r} on the PATH{hint}"


def _filled(match: re.Match[str], values: Mapping[str, str]) -> str:
    return f"{{{match[1]}}}" if match[1] else values[match[2]]


def _found(word: str, folder: Path) -> str:
    """The full path of a word that names a file of the folder, after `--option=` too; of a folder only with a slash."""
    option, equals, value = word.rpartition("=")
    there = os.path.join(folder, value)  # the value itself where it is a full path
    if value and (os.path.isfile(there) or (os.sep in value and os.path.isdir(there))):
        return f"{option}{equals}{os.path.normpath(there)}"
    return word
