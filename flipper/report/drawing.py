"""Drawing: all figures of a report, as SVG inside the page and as files for a paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Final, TypeVar

from markupsafe import Markup

from flipper.checkpoints.output import atomic_output, writing
from flipper.report.figures import curves, detectors, exposure, heat_map, outcome_bars, paired, recovery_costs, replicas
from flipper.report.material import Material, Picture
from flipper.report.palette import COLOURS, drawing

T = TypeVar("T")

DRAWERS: Final[dict[str, Callable[[Material], Picture | None]]] = {
    "trade-off": recovery_costs.draw,
    "outcomes": outcome_bars.draw,
    "bits-by-layer": heat_map.draw,
    "curves": curves.draw,
    "paired": paired.draw,
    "exposure": exposure.draw,
    "replicas": replicas.draw,
    "detectors": detectors.draw,
}
"""Name of a figure -> what draws it."""

_VARIABLES: Final = {light: f"var(--fig-{name})" for name, (light, _) in COLOURS.items()}


def inlined(drawers: Mapping[str, Callable[[T], Picture | None]], subject: T) -> dict[str, tuple[Picture, Markup]]:
    """Each figure that the subject has something to show for, by name, with its SVG for the page."""
    found = {}
    for name, draw in drawers.items():
        with drawing(salt=name):
            picture = draw(subject)
            if picture is not None:
                found[name] = picture, inline(picture)
    return found


def inline(picture: Picture) -> Markup:
    """The figure as SVG within HTML: its colours follow the page's, and it asks for nothing from outside."""
    out = StringIO()
    picture.figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    body = svg[svg.index(">", svg.index("<svg ")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = _own_ids(body, picture.name)
    body = re.sub(r"(fill|stroke): (#[0-9a-f]{6})", _variable, body)
    body = body.replace("font-family: 'DejaVu Sans'; ", "")
    body = re.sub(r"\s*\n\s*", " ", body)
    width, height = (72 * inches for inches in picture.figure.get_size_inches())
    start = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">').format(
        f"{picture.title}. {picture.says}", f"{width:g}", f"{height:g}"
    )
    return start + Markup(body)


def _own_ids(body: str, name: str) -> str:
    """Ids are made this figure's own, since a page has several; those that nothing refers to are dropped."""
    meant = set(re.findall(r'(?:url\(|xlink:href=")#([^)"]+)', body))
    body = re.sub(r'(<[a-zA-Z]+)( [^<>]*?)? ?id="([^"]+)"', lambda found: _with_id(found, meant, name), body)
    return re.sub(r'(url\(|xlink:href=")#', rf"\g<1>#{name}-", body)


def _with_id(found: re.Match[str], meant: set[str], name: str) -> str:
    start = f"{found[1]}{found[2] or ''}"
    return f'{start} id="{name}-{found[3]}"' if found[3] in meant else start


def _variable(found: re.Match[str]) -> str:
    return f"{found[1]}: {_VARIABLES.get(found[2], found[2])}"


def write_figures(material: Material, folder: Path) -> list[Path]:
    """Write each figure as PDF and SVG, replacing what is there; the folder is made. Raises OutputError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in DRAWERS.items():
        with drawing(salt=name, text="path"):
            picture = draw(material)
            if picture is None:
                continue
            for suffix, empty in (("pdf", {"CreationDate": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{suffix}"
                with atomic_output(path, force=True) as partial:
                    picture.figure.savefig(partial, format=suffix, metadata={**empty, "Title": picture.title})
                written.append(path)
    return written
