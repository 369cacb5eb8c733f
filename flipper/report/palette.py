"""Colours of the figures, safe for the colour-blind (after Okabe and Ito, and Tol), for light and for dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "paper": ("#fefefe", "#15181d"),
    "ink": ("#1c2127", "#e6e9ed"),
    "muted": ("#66707c", "#98a2ae"),
    "grid": ("#dce0e5", "#363c44"),
    "identical": ("#cfe1f2", "#2c4258"),
    "masked": ("#93c0e4", "#44749d"),
    "recovered": ("#4a8fc7", "#7db8e8"),
    "degraded": ("#e69f00", "#f0b429"),
    "extreme": ("#d55e00", "#e8743b"),
    "non-finite": ("#9b2a63", "#d0699d"),
    "hang": ("#5f4b8b", "#a794d8"),
    "crash": ("#2f2f33", "#f2f2f0"),
    "refused": ("#8d8d92", "#909095"),
    "parameters": ("#0b5351", "#4fb3ae"),
    "gradients": ("#00a896", "#8ee3d5"),
    "buffers": ("#c9b458", "#e0cd7c"),
    "optimizer": ("#7a6f9b", "#b3a8d6"),
    "band": ("#b9c2cb", "#59626d"),
    "share0": ("#e9ecef", "#262b32"),
    "share1": ("#fbdba0", "#5c4218"),
    "share2": ("#f4a65a", "#96591f"),
    "share3": ("#d9602b", "#d0702f"),
    "share4": ("#8f1d2c", "#ffc48a"),
}
"""Name -> its colour on a light and on a dark page; no two light ones are equal, so that they can be told apart."""

GROUPS: Final = {"benign": "recovered", "sdc": "extreme", "due": "non-finite"}
"""Which colour stands for a group of outcomes."""

SHARES: Final = (("share0", 0.0), ("share1", 0.1), ("share2", 0.25), ("share3", 0.5), ("share4", 1.0))
"""Colours of shares from none to all, each up to and with the number beside it."""


def colour(name: str) -> str:
    """The light colour; pages put the dark one in its place where dark is preferred."""
    return COLOURS[name][0]


def share_colour(share: float) -> str:
    """The colour of a share."""
    return colour(next(name for name, most in SHARES if share <= most))


@contextmanager
def drawing(salt: str, text: str = "none") -> Iterator[None]:
    """Figures are drawn and saved inside. salt: what the ids in the SVG depend on. text: "none" or "path".

    Names from a checkpoint are never taken for formulas, and may have characters that the font lacks.
    """
    import warnings

    import matplotlib

    style: Any = {
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "axes.linewidth": 0.7,
        "svg.fonttype": text,
        "svg.hashsalt": salt,
        "pdf.fonttype": 42,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
                        colour("ink")),
        "axes.edgecolor": colour("muted"),
        "grid.color": colour("grid"),
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }  # fmt: skip
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
