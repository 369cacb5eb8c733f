"""Writing: the page, the figures and the numbers of a campaign, each as a file."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flipper.campaigns.folder import Campaign
from flipper.campaigns.results import load_results
from flipper.campaigns.summary import summary
from flipper.checkpoints.output import atomic_output
from flipper.errors import UsageError
from flipper.strict_json import strict

if TYPE_CHECKING:
    from flipper.report.material import Material

NEEDED: Final = ("matplotlib", "jinja2", "scipy")
"""What a report needs beside flipper's own requirements."""


def write_report(campaign: Campaign, page: Path | None = None, figures: Path | None = None) -> list[Path]:
    """Write the page (None: report.html in the campaign's folder) and, if asked for, the figures; what was written.

    Replaces what is there. Raises UsageError when nothing was stored or a library is missing, OutputError when a file
    can't be written or the database is damaged.
    """
    material, target = _material(campaign), page or campaign.folder.report
    _write(target, _module("page").html(material))
    return [target, *_figures(material, figures)]


def write_numbers(campaign: Campaign, file: Path | None, figures: Path | None = None) -> tuple[str, list[Path]]:
    """The page's numbers as JSON, written to a file if there is one; and what was written. Raises as write_report."""
    if figures is None:
        numbers: Any = summary(load_results(campaign))
        written = []
    else:
        material = _material(campaign)
        numbers, written = material.numbers, _figures(material, figures)
    text = json.dumps(strict(numbers), indent=1) + "\n"
    if file is not None:
        _write(file, text)
        written.insert(0, file)
    return text, written


def _material(campaign: Campaign) -> Material:
    for name in NEEDED:
        if find_spec(name) is None:
            raise UsageError(f"a report needs {name}, which is not installed; pip install 'flipper-ckpt[report]'")
    material: Material = _module("material").material_of(campaign)
    return material


def _figures(material: Material, folder: Path | None) -> list[Path]:
    return [] if folder is None else list(_module("drawing").write_figures(material, folder))


def _module(name: str) -> Any:
    """A module of this package that imports the libraries, once it is known that they are there."""
    return import_module(f"flipper.report.{name}")


def _write(path: Path, text: str) -> None:
    with atomic_output(path, force=True) as partial:
        partial.write_text(text, "utf-8", errors="backslashreplace")
