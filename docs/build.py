"""Builds the site in build/site: `pip install -e '.[docs]' && python docs/build.py`.

The pages are plain Markdown that GitHub shows as it is. They are copied with the pages outside of docs/ that
they link to, in the same folders, so that every link leads to the same place. The navigation is made of
docs/README.md. One page exists on the site only: the docstrings.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
DOCSTRINGS = """# Docstrings

The functions and classes of the [Python API](api.md), as their docstrings have them.

::: trainer.train
::: trainer.open
::: trainer.gather
::: trainer.load_model
::: trainer.tasks.base.Task
::: trainer.data.stream.Stream
::: trainer.loggers.base.Logger
::: trainer.errors
    options:
      filters: ["^[A-Z]"]
"""


def main() -> None:
    pages, site = BUILD / "pages", BUILD / "site"
    for folder in (pages, site):
        shutil.rmtree(folder, ignore_errors=True)
    for file in files():
        (pages / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, pages / file)
    (pages / "docs/reference/docstrings.md").write_text(DOCSTRINGS)
    settings = (ROOT / "docs/mkdocs.yml").read_text()
    (BUILD / "mkdocs.yml").write_text(
        settings + yaml.safe_dump({**repository(), "nav": navigation()}, sort_keys=False)
    )
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    sys.exit(subprocess.run(zensical, cwd=BUILD).returncode)


def files() -> list[Path]:
    """Pages, pictures and the style, relative to the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    found += [file for ending in ("md", "ipynb") for file in (ROOT / "examples").rglob(f"*.{ending}")]
    found += [file for ending in ("md", "svg", "png", "css") for file in (ROOT / "docs").rglob(f"*.{ending}")]
    found += (ROOT / "benchmarks/results").glob("*.json")
    return sorted(file.relative_to(ROOT) for file in found)


def repository() -> dict[str, str]:
    """Return the settings for a link to the repository, from the address that this clone came from."""
    asked = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
    address = re.sub(r"^git@([^:]+):", r"https://\1/", asked.stdout.strip().removesuffix(".git"))
    return {"repo_url": address} if address.startswith("https://") else {}


def navigation() -> list[object]:
    """README.md, then the parts of docs/README.md, each with the pages that it links to."""
    parts: dict[str, list[str]] = {}
    text = (ROOT / "docs/README.md").read_text()
    for name, part in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        links = (ROOT / "docs" / link for link in re.findall(r"\]\(([\w/.-]+\.md)\)", part))
        parts[name] = [str(link.resolve().relative_to(ROOT)) for link in links]
    parts["Reference"].append("docs/reference/docstrings.md")
    return [{"Ringmaster": "README.md"}, *({name: links} for name, links in parts.items())]


if __name__ == "__main__":
    main()
