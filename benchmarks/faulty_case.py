"""The failures of a run and their outcomes, as rows and as a table."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.failure_parts import fault

OUTSIDE = ("kill", "pair", "stop", "saver", "again", "cut")
INJECTED = ("update", "raise", "hang", "exit", "slow", "nan")
STRATEGIES = {
    "single": ("strategy=single",),
    "dp": ("strategy=dp",),
    "ddp": ("strategy=ddp",),
    "ddp-ring": ("strategy=ddp", "comm=ring"),
    "ddp-hierarchical": ("strategy=ddp", "comm=hierarchical"),
    "fsdp": ("strategy=fsdp", "checkpoint.every_steps=20"),
    "hybrid": ("strategy=fsdp", "checkpoint.every_steps=20", "strategy.shard_group=2"),
    "exact": ("strategy=ddp", "train.exact=4"),
    "servers": ("strategy=parameter_server", "strategy.servers=all", "checkpoint.every_steps=20"),
}
_NOT_SAVED = re.compile(r"no step was saved: (.*)")


@dataclass(frozen=True)
class Fault:
    kind: str
    step: int
    phase: str = "update"
    rank: int = 0  # of an injected failure

    def command_line(self, mark: Path) -> Sequence[str]:
        """Return the overrides that inject the failure, or [] if it comes from outside; `mark` records it."""
        if self.kind not in INJECTED:
            return []
        kind = "kill" if self.kind == "update" else self.kind
        return fault(kind, self.rank, self.step, self.phase, mark=mark)


@dataclass(frozen=True)
class Case:
    strategy: str
    world: int
    faults: tuple[Fault, ...]  # by step; the first one may be injected
    seed: int

    @property
    def name(self) -> str:
        return f"{self.strategy} x{self.world}"


@dataclass
class Row:
    """The outcome of one failure; seconds are since the failure.

    Attributes:
        misjudged: what is wrong with the failure report.
        problems: what else is wrong.
        equal: whether the run ended with the hash of an uninterrupted run.
    """

    case: Case
    kind: str
    lost: int = 0
    report: str = ""
    report_s: float | None = None
    next_step_s: float | None = None
    misjudged: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    equal: bool = True

    @property
    def right(self) -> bool:
        return self.equal and not self.misjudged and not self.problems

    @property
    def saved_by(self) -> str:
        """Return which rank saved: rank 0 | another | nobody."""
        if found := re.search(
            r"step \d+ was (?:already )?saved(?: by rank (\d+))?|saves the last step", self.report
        ):
            return "rank 0" if found[1] == "0" else "another"
        return "nobody"

    @property
    def why_not(self) -> str:
        """Return the reason why no rank saved."""
        if found := _NOT_SAVED.search(self.report):
            return found[1]
        if self.kind == "nan":
            return "after a NaN there is no save"
        return "the only rank is gone" if self.case.world == 1 else "the report names no reason"

    def __str__(self) -> str:
        seconds = "-" if self.next_step_s is None else f"{self.next_step_s:.1f}"
        wrong = [*self.misjudged, *self.problems, *([] if self.equal else ["another hash"])]
        facts = f"{self.case.seed:>6} {self.case.name:<20} {self.kind:<7} {self.lost:>3} lost {seconds:>6} s"
        return f"  {facts}  {'; '.join(wrong) or 'right'}  [{self.report}]"


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each kind of failure in each kind of run, and the reasons why no rank saved."""
    savers = ("rank 0", "another", "nobody")
    heads = ("tried", "report", *savers, "0 lost", "1 lost", "more", "hash", "right", "s", "p90")
    lines = [f"{'':<20} {'kind':<7} " + " ".join(f"{head:>7}" for head in heads)]
    for name, kind in sorted({(row.case.name, row.kind) for row in rows}):
        these = [row for row in rows if (row.case.name, row.kind) == (name, kind)]
        lost = [sum(row.lost == n for row in these) for n in (0, 1)]
        counts = (
            *(len(these), sum(not row.misjudged for row in these)),
            *(sum(row.saved_by == saver for row in these) for saver in savers),
            *(*lost, len(these) - sum(lost)),
            *(sum(row.equal for row in these), sum(row.right for row in these)),
        )
        times = sorted(row.next_step_s for row in these if row.next_step_s is not None) or [float("nan")]
        p90 = times[max(0, -(-9 * len(times) // 10) - 1)]
        seconds = f"{statistics.median(times):>7.1f} {p90:>7.1f}"
        lines.append(f"{name:<20} {kind:<7} " + " ".join(f"{count:>7}" for count in counts) + f" {seconds}")
    reasons = Counter((row.kind, row.why_not) for row in rows if row.saved_by == "nobody" and row.lost)
    lines += [f"{count} x {kind}, nobody saved: {reason}" for (kind, reason), count in reasons.items()]
    lost_in_all = sum(row.lost for row in rows)
    right = sum(row.right for row in rows)
    return [*lines, f"{right} of {len(rows)} are right; {lost_in_all} steps lost in all"]
