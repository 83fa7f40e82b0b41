"""The look of the pictures that matplotlib draws, in light and in dark."""

import platform
from datetime import date
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent
_TEXT, _EDGE, _GRID, _PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
# A picture is drawn in light; of its file the dark one is made, colour by colour.
_DARK = {
    _TEXT: "#e6edf3",
    _EDGE: "#9198a1",
    _GRID: "#3d444d",
    _PAPER: "#0d1117",
    "#000000": "#ffffff",
    "#4c78a8": "#6ea4dc",
    "#1f77b4": "#58a6ff",
}


def use() -> None:
    """Every figure made from now on has this look."""
    matplotlib.rcParams.update(
        {
            "axes.edgecolor": _EDGE,
            "axes.labelcolor": _TEXT,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": _TEXT,
            "axes.titlesize": "small",
            "figure.facecolor": _PAPER,
            "font.size": 14,  # about 10 pixels on a page of 400
            "grid.color": _GRID,
            "legend.frameon": False,
            "savefig.facecolor": _PAPER,
            "svg.hashsalt": "pictures",
            "text.color": _TEXT,
            "xtick.color": _EDGE,
            "xtick.labelcolor": _TEXT,
            "ytick.color": _EDGE,
            "ytick.labelcolor": _TEXT,
        }
    )


def save(figure: Figure, name: str) -> None:
    """Write NAME-light.svg and NAME-dark.svg."""
    file = HERE / f"{name}-light.svg"
    figure.savefig(file, metadata={"Date": None})
    darken(file)


def darken(light: Path) -> None:
    """Write the dark variant of a file NAME-light.svg."""
    text = light.read_text()
    for colour, dark in _DARK.items():
        text = text.replace(colour, dark)
    light.with_name(light.name.replace("-light", "-dark")).write_text(text)


def machine() -> str:
    """Where and when a picture was made, for its caption."""
    import os

    return f"{os.cpu_count()} cores, {platform.machine()}, {date.today()}"
