"""The site is built from the pages, and its links, anchors and images exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.programs import ROOT

SITE = ROOT / "build/site"


class Page(HTMLParser):
    """The IDs, links and images of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src", "srcset") and value:
                self.targets.add(value)


page = cache(Page)


@pytest.mark.slow
def test_the_site_is_built_and_its_links_work() -> None:
    if importlib.util.find_spec("zensical") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs pip install -e '.[docs]'")
    built = subprocess.run([sys.executable, "docs/build.py"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    html = sorted(SITE.rglob("*.html"))
    assert len(html) > len(list((ROOT / "docs").rglob("*.md")))
    broken = []
    for file in html:
        for target in page(file).targets:
            name, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z]+:|//|data:", target) or file.name == "404.html":
                continue
            there = (file.parent / name).resolve() if name else file
            if not there.exists() or (anchor and there.suffix == ".html" and anchor not in page(there).ids):
                broken.append(f"{file.relative_to(SITE)}: {target}")
    assert not broken, "\n".join(broken)
