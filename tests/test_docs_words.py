"""The words of the pages and of messages: plain English, at most 25 words a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import _BLOCK, PAGES, ROOT, texts_in_code

MOST = 25
# Old or private English, and what to write for it.
BANNED = {
    r"\b(lest|anew|whence|whoever|dear|besides)\b": "so that not, again, from where, who, costly, beside",
    r"\bof ours\b": "our",
    r"\bso many\b": "N, a number of",
    r"(?<!\bthere )\bis no (?!longer|more)\w+": "is not a",
    r"\b(is|are|was|were|be) refused\b|\brefused are\b": "raises an error",
    r"\bother bits\b": "differs",
    r"\bthe \w+ of which\b": "whose",
    r"\bprocessor (time|seconds)\b": "CPU time",
    r"(?<!matplotlib )\bfigures?\b": "number, picture",
}
# What has been released says what it said.
PROSE = [page for page in PAGES if page.name != "CHANGELOG.md"]


def prose(page: Path) -> str:
    """A page without its code; a name in code is one word."""
    text = re.sub(r"<!--.*?-->|<picture>.*?</picture>", "", _BLOCK.sub("\n", page.read_text()), flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", re.sub(r"`[^`]*`", "NAME", text))
    return re.sub(r"\[([^\]]*)\]\([^)\s]+\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """Of each paragraph, item, heading and cell of a table."""
    for passage in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |#|\|))", text):
        cells = passage.strip().strip("|").split("|") if passage.lstrip().startswith("|") else [passage]
        for cell in cells:
            yield from (each for each in re.split(r"(?<=[.!?])[*)\"]*\s+", " ".join(cell.split())) if each)


def words(sentence: str) -> int:
    return len(re.findall(r"\S*\w\S*", sentence))


def test_what_is_counted() -> None:
    text = "| one two. Three. | four |\n- Five\n  six.\n- Seven **Eight.** Nine"
    assert [each.strip() for each in sentences(text)] == [
        *("one two.", "Three.", "four", "- Five six.", "- Seven **Eight.", "Nine")
    ]
    assert words("- Seven = **eight** (nine), a/b") == 4


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain_english(page: Path) -> None:
    text = prose(page)
    long = [each for each in sentences(text) if words(each) > MOST]
    line = " ".join(text.split())  # words may stand on two lines
    found = [(match[0], say) for word, say in BANNED.items() for match in re.finditer(word, line, re.I)]
    assert not long and not found


def test_messages_are_plain_english() -> None:
    found = [
        (where, word)
        for where, text in texts_in_code()
        for word in BANNED
        if " " in text and re.search(word, text, re.I)
    ]
    assert not found
