"""The pages: links work, commands exist and compose, and generated pages are up to date."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from omegaconf import OmegaConf

from tests import runs
from tests.programs import finish
from trainer import config, troubleshooting
from trainer.config.overrides import leaves

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])
_BLOCK = re.compile(
    r"(?:<!-- (?:skip: (?P<skip>[^>]+)|needs: (?P<needs>\w+)) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What a command may begin with, besides those that are looked at more closely.
OTHERS = {
    *("pip", "pytest", "git", "ruff", "mypy", "tensorboard", "docker", "grep"),
    *("cd", "ls", "head", "pkill", "source", "python3", "scontrol"),
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    skip: str | None = None
    needs: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(*kinds: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match["kind"], match["text"], match["skip"], match["needs"]))
    return [block for block in found if block.kind in kinds]


# Those of examples/ are run by tests/test_examples.py.
SHELL = [block for block in _blocks("bash") if block.skip is None and "examples" not in block.page.parts]


def _commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command in a block."""
    text = re.sub(r"\$\([^)]*\)", "HOST", block.text.replace("\\\n", " "))
    for line in text.splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in (";", "&&", "|", "&"):
                words.append(word)
            elif words:
                yield words
                words = []


def test_there_are_pages_and_blocks() -> None:
    assert len(PAGES) > 25 and len(SHELL) > 40
    kinds = {block.kind for block in _blocks("", "bash", "sh", "console", "shell")}
    assert kinds == {"bash"}, "a block is bash, python, yaml or text"


def test_the_size_of_the_core_that_the_readme_states() -> None:
    text = (ROOT / "README.md").read_text()
    (about,) = re.findall(r"is about ([\d,]+) lines", text)
    (names,) = re.findall(r"in `trainer/` with (.*?`)\. ", text, re.S)
    files = [ROOT / "train.py", *(ROOT / "trainer" / name for name in re.findall(r"`([\w/.]+)`", names))]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert len(files) == 8 and abs(lines - int(about.replace(",", ""))) < 100


def test_the_help_fits_a_screen_and_names_pages() -> None:
    done = finish("train.py", "--help")
    assert done.code == 0 and len(done.stdout.splitlines()) <= 24
    assert {*re.findall(r"^(\w+): ", done.stdout, re.M)} >= {"model", "strategy", "experiment"}
    pages = re.findall(r"[\w/]+\.md", done.stdout)
    assert len(pages) == 4 and all((ROOT / page).exists() for page in pages)


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
    found = set[str]()
    for heading in re.findall(r"^#+ (.*)$", _BLOCK.sub("", page.read_text()), re.M):
        plain = _LINK.sub("", heading) if "](" in heading else heading
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", page.read_text()))
    for target in _LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in _anchors(there), f"{target}: no such heading"


PICTURE = re.compile(r'(?:src|srcset)="([^"]+)"|!\[[^\]]*\]\(([^)\s]+)\)')


def test_images_exist_are_small_and_are_used() -> None:
    shown = set()
    for page in PAGES:
        found = ["".join(names) for names in PICTURE.findall(_BLOCK.sub("", page.read_text()))]
        for name in found:
            shown.add((page.parent / name).resolve())
            assert name.replace("-light.", "-dark.") in found, f"{page}: {name} has no dark variant"
    made = {file for ending in ("svg", "png") for file in (ROOT / "docs/pictures").glob(f"*.{ending}")}
    shown.add(ROOT / "docs/pictures/logo.svg")  # by mkdocs.yml
    assert shown == made and all(file.stat().st_size < 150_000 for file in made)


RESULT = re.compile(r"\[([^\]]*)\]\((\S*benchmarks/results/\w+\.json)\)")


def _covered(text: str, at: int) -> str:
    """Return the text that a link to a result at `at` covers: its table row without the first cell, its list
    item or paragraph, or, if the paragraph begins with "Recorded", the table or block before it."""
    begin, end = text.rfind("\n\n", 0, at) + 2, text.find("\n\n", at)
    passage, before = text[begin:end], text[:begin].rstrip()
    line = text[text.rfind("\n", 0, at) + 1 : text.find("\n", at)]
    if line.startswith("|"):
        return line.split("|", 2)[2]
    if not passage.startswith("Recorded "):
        return next(item for item in re.split(r"\n(?=- )", passage) if line in item)
    if before.endswith("```"):
        return before[before.rfind("```text") :]
    table = before[before.rfind("\n\n") :].strip().splitlines()
    return "\n".join(row.split("|", 2)[2] for row in table[2:])


def _numbers(text: str) -> list[str]:
    plain = re.sub(r"`[^`\n]+`|\]\(\S+\)|\d{4}-\d\d-\d\d", "", text)
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", plain))


def test_numbers_equal_the_results_of_benchmarks() -> None:
    """Each number that a link to a result covers is in the result, rounded; the link has the date."""
    linked = 0
    for page in PAGES:
        text = page.read_text()
        for link in RESULT.finditer(text):
            result = json.loads((page.parent / link[2]).read_text())
            written = [*map(float, _numbers("\n".join([result["command"], *result["output"]])))]
            for figure in _numbers(_covered(text, link.start())):
                places = len(figure.partition(".")[2])
                assert float(figure) in {round(number, places) for number in written}, (
                    f"{page}: {figure} is not in {link[2]}"
                )
            assert link[1] == result["date"], f"{page}: {link[2]} is of {result['date']}"
            linked += 1
    assert linked


@functools.cache
def texts_in_code() -> list[tuple[str, str]]:
    """Return all strings in the code except docstrings, with their locations; f-strings without values."""
    found = []
    for file in [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "planner").rglob("*.py")]:
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in docstrings and isinstance(node.value, str):
                found.append((f"{file}:{node.lineno}", node.value))
    return found


def test_troubleshooting_entries_match_the_errors_that_link_to_them() -> None:
    """The headings before the section on torch, split at dots, are in the code."""
    page = (ROOT / troubleshooting.PAGE).read_text()
    anchored = dict(re.findall(r'^<a id="(.+)"></a>\n\n### `(.+)`$', page, re.M))
    assert anchored == troubleshooting.ENTRIES
    ours, theirs = page.split("\n## torch and torchrun\n")
    headings = set(re.findall(r"^### `(.+)`$", ours, re.M))
    assert headings <= set(anchored.values()) and len(headings) + theirs.count("\n### ") >= 25
    texts = [text for where, text in texts_in_code() if not where.startswith(troubleshooting.__file__)]
    for anchor, message in anchored.items():
        if message in headings:
            for part in message.split("..."):
                assert any(part.strip() in text for text in texts), message
        assert troubleshooting.see(f"before {message.replace('...', 'this')} after").endswith(f"#{anchor}")


def test_every_page_is_listed() -> None:
    listed = {
        (ROOT / "docs" / link).resolve() for link in _LINK.findall((ROOT / "docs/README.md").read_text())
    }
    assert {page for page in (ROOT / "docs").rglob("*.md") if page.name != "README.md"} <= listed


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_settings_page_is_up_to_date() -> None:
    generate = _script("generate_settings")
    page = generate.PAGE.read_text()
    assert page == generate.page(), "run python docs/generate_settings.py"
    for file in (ROOT / "conf").glob("**/*.yaml"):
        group = ".".join(file.relative_to(ROOT / "conf").parts[:-1])
        for name, _ in leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=False), group):
            if name and not name.startswith(("experiment", "hydra.", "defaults", f"{group}.defaults")):
                assert f"`{name.rstrip('.')}`" in page, f"{file}: {name}"
    entries = re.findall(r"^\| `(\S+)` \| (.*) \| .* \| (.*) \|$", page, re.M)
    undescribed = [name for name, kind, description in entries if not description or kind == "null"]
    assert entries and not undescribed, f"needs a comment in conf/: {undescribed}"


def test_the_api_page_is_up_to_date_and_complete() -> None:
    generate = _script("generate_api")
    page = generate.PAGE.read_text()
    assert page == generate.page(), "run python docs/generate_api.py"
    settings = (ROOT / "docs/reference/settings.md").read_text()
    for block in [each for each in _blocks("python", "yaml") if each.page.name != "CONTRIBUTING.md"]:
        for name in re.findall(
            r"\btrainer(?!\.fit|\.kubeflow)(?:\.\w+)+",
            re.sub(r"^from .*|^import .*", "", block.text, flags=re.M),
        ):
            assert f"### {name}\n" in page or f"`{name}`" in settings, f"{block}: {name}"


def test_the_commands_page_has_every_choice_of_every_group() -> None:
    text = (ROOT / "docs/reference/commands.md").read_text()
    listed = {
        group: re.findall(r"`(\w+)", row) for group, row in re.findall(r"^\| `(\w+)=` \| (.*)$", text, re.M)
    }
    for folder in (ROOT / "conf").iterdir():
        if folder.is_dir() and folder.name != "hydra":
            choices = {file.stem for file in folder.glob("*.yaml")}
            assert choices <= {*listed[folder.name]}, f"{folder.name}: {choices - {*listed[folder.name]}}"


@pytest.mark.parametrize("block", _blocks("python", "yaml"), ids=str)
def test_python_and_yaml_can_be_read(block: Block) -> None:
    if block.kind == "python":
        ast.parse(block.text)
    else:
        assert yaml.safe_load(block.text)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_exist(block: Block) -> None:
    for words in _commands(block):
        if "train.py" in words:
            _check_torchrun(words[: words.index("train.py")])
        elif "-m" in words and words[0] in ("python", "torchrun", "srun"):
            at = words.index("-m")
            _check_torchrun(words[:at])
            _check_module(words[at + 1], words[at + 2 :])
        elif words[0] == "python" or "/" in words[0]:
            file = words[1] if words[0] == "python" else words[0]
            assert (ROOT / file).exists(), words
        else:
            assert words[0] in OTHERS, words


def _check_torchrun(words: list[str]) -> None:
    if "torchrun" in words:
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*words[words.index("torchrun") + 1 :], "train.py"])


def _check_module(module: str, words: list[str]) -> None:
    if module.partition(".")[0] not in ("trainer", "planner", "benchmarks"):
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"python -m {module}"
    file = Path(spec.origin)
    if file.name == "__init__.py":
        assert (file.parent / "__main__.py").exists(), f"python -m {module}"
    source = _source(ROOT / module.partition(".")[0])
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in source, f"{module} {option}"


@functools.cache
def _source(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.rglob("*.py"))


def _overrides(words: list[str]) -> list[str] | None:
    """Return the settings of a command line, or those of one trial of a sweep."""
    if "train.py" in words:
        return _first_trial([word for word in words[words.index("train.py") :] if _sets(word)])
    if "-m" in words and words[words.index("-m") + 1].startswith(("trainer", "planner", "benchmarks")):
        return [word for word in words[words.index("-m") + 1 :] if _sets(word)]
    return None


def _sets(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _first_trial(overrides: list[str]) -> list[str]:
    found = []
    for text, override in zip(overrides, OverridesParser.create().parse_overrides(overrides), strict=True):
        if not override.is_sweep_override():
            found.append(text)
        elif isinstance(override.value(), ChoiceSweep):
            found.append(f"{override.key_or_group}={next(iter(override.sweep_string_iterator()))}")
        else:
            found.append(f"{override.key_or_group}={override.value().start}")
    return found


def _composed(blocks: list[Block]) -> set[tuple[str, ...]]:
    every = (_overrides(words) for block in blocks for words in _commands(block))
    return {tuple(overrides) for overrides in every if overrides is not None}


QUICK = _composed([block for block in SHELL if block.page.name == "README.md"])
SLOW = _composed(SHELL) - QUICK


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the settings from the tutorial."""
    folder = tmp_path_factory.mktemp("conf")
    for block in _blocks("yaml"):
        name = re.match(r"# conf/(\S+)\n", block.text)
        if block.page.name == "tutorial.md" and name:
            (folder / name[1]).parent.mkdir()
            (folder / name[1]).write_text(block.text)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [*sorted(QUICK), *(pytest.param(overrides, marks=pytest.mark.slow) for overrides in sorted(SLOW))],
    ids=lambda overrides: " ".join(overrides) or "none",
)
def test_commands_compose(overrides: tuple[str, ...], own: Path) -> None:
    if not {"model=mine", "data=mine"} & set(overrides):
        assert runs.settings(*overrides)
        return
    with initialize_config_dir(str(runs.CONF), version_base="1.3"):
        both = [f"hydra.searchpath=[file://{own}]", *overrides]
        assert config.load(compose("train", overrides=both))
