"""Test many models on ranks that are started only once, and record answers about each model."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import RankFailure, run_ranks
from trainer.errors import UserError, first_line

Table = dict[str, dict[str, str]]


class Refused(Exception):  # noqa: N818
    """Ends the tests of a model after an error; the ranks are restarted for the next model."""


class Answers:
    """This rank's answers about a model, by question: yes, refused (with the message for users) or WRONG."""

    def __init__(self, out: Path, name: str) -> None:
        self._file, self._name = out.with_suffix(f".{os.environ['RANK']}"), name

    def give(self, question: str, value: str) -> None:
        with self._file.open("a") as file:
            print(json.dumps([self._name, question, value]), file=file, flush=True)

    def result_of(self, question: str, test: Callable[[], Any]) -> Any:
        """Return the result of `test`; if it raises an error, record it as the answer and raise Refused."""
        try:
            return test()
        except UserError as error:
            value = f"refused: {error}"
        except Exception as error:
            value = f"WRONG: {type(error).__name__}: {first_line(error)}"
        self.give("ended", question)
        self.give(question, value)
        raise Refused


def visit_each(
    visit: Callable[[Answers, str], None], ranks: int, names: Sequence[str], out: Path, timeout_s: float = 600
) -> Iterator[str]:
    """Call `visit` with each name on each rank, and yield the finished names.

    Args:
        timeout_s: time limit per name in seconds.
    """
    left = list(names)
    while left:
        try:
            run_ranks(_visit, ranks, visit, left, out, init=False, timeout_s=timeout_s * len(left))
        except RankFailure as failure:
            if not all("Refused" in report for report in failure.reports.values()):
                print(failure, file=sys.stderr, flush=True)
        table = read(out)
        done = [name for name in left if name in table]
        if not done:
            _give_up(out, left[0])
        for name in done or left[:1]:
            left.remove(name)
            yield name


def _visit(visit: Callable[[Answers, str], None], names: Sequence[str], out: Path) -> None:
    for name in names:
        visit(Answers(out, name), name)


def _give_up(out: Path, name: str) -> None:
    with out.with_suffix(".0").open("a") as file:
        print(json.dumps([name, "ranks", "WRONG: ranks ended without a message"]), file=file)


def read(out: Path) -> Table:
    """Return all answers so far, by name and question."""
    table: Table = {}
    for file in sorted(out.parent.glob(f"{out.stem}.[0-9]")):
        for line in file.read_text().splitlines():
            name, question, value = json.loads(line)
            table.setdefault(name, {})[question] = value
    return table
