"""The badges of README: python docs/pictures/badges.py."""

from html import escape
from pathlib import Path

BADGES = [
    ("python", "3.11 or newer", "#3776ab"),
    ("torch", "2.11 or newer", "#c8421f"),
    ("license", "Apache-2.0", "#3f51b5"),
    ("tests", "pytest", "#2e7d32"),
    ("bit-identical on", "1, 2, 4 ranks", "#2e7d32"),
]
_CHARACTER, _PAD, _HEIGHT, _GAP = 6.6, 7, 20, 6  # pixels, at 11 pixels a line


def drawn() -> str:
    """Return the badges side by side as SVG."""
    parts, x = [], 0.0
    for name, value, colour in BADGES:
        for words, fill in ((name, "#555"), (value, colour)):
            width = len(words) * _CHARACTER + 2 * _PAD
            parts.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="{_HEIGHT}" fill="{fill}"/>')
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="14" textLength="{len(words) * _CHARACTER:.1f}">'
                f"{escape(words)}</text>"
            )
            x += width
        x += _GAP
    style = 'fill="#fff" text-anchor="middle" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11"'
    size = f'width="{x - _GAP:.0f}" height="{_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<g {style}>\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("badges.svg").write_text(drawn())
