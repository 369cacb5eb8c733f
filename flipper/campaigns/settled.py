"""Settled: campaign.json, what the campaign of a folder asks for, read again and checked as a campaign file is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flipper.campaigns.spec import Spec
from flipper.errors import DAMAGED, UsageError, shortened
from flipper.text_files import read_text


def read_settled(file: Path) -> tuple[Spec, list[dict[str, Any]]]:
    """The spec and the records of the cells; raises UsageError."""
    try:
        document = json.loads(read_text(file))
        if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
            raise UsageError("it holds no spec")
        return Spec.from_record(document["spec"]), _cells(document.get("cells"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{file.parent} is no campaign's folder: it has no {file.name}; `campaign run` makes one"
        ) from None
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror or error}") from error
    except DAMAGED as error:
        raise UsageError(f"{file} is damaged: {shortened(str(error))}") from error


def _cells(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise UsageError("it holds no cells")
    if wrong := [each for each in given if not _is_cell(each)]:
        raise UsageError(f"a cell must be a table of its number, axes and trials, not {wrong[0]!r}")
    _check_once([cell["cell"] for cell in given])
    return given


def _is_cell(given: Any) -> bool:
    return (
        isinstance(given, dict)
        and isinstance(given.get("axes"), dict)
        and all(type(given.get(key)) is int and given[key] >= least for key, least in (("cell", 0), ("trials", 1)))
    )


def _check_once(numbers: Sequence[int]) -> None:
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"two cells have the number {max(numbers, key=numbers.count)}")
