"""The failures of a run and their outcomes, as table rows."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.failure_parts import inject

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
class Failure:
    kind: str
    step: int
    phase: str = "update"
    rank: int = 0  # rank of an injected failure

    def command_line(self, mark: Path) -> Sequence[str]:
        """Return overrides that inject the failure, recorded in `mark`, or [] if it is external."""
        if self.kind not in INJECTED:
            return []
        kind = "kill" if self.kind == "update" else self.kind
        return inject(kind, self.rank, self.step, self.phase, mark=mark)


@dataclass(frozen=True)
class Case:
    strategy: str
    world: int
    failures: tuple[Failure, ...]  # in the order of steps; only the first may be injected
    seed: int

    @property
    def name(self) -> str:
        return f"{self.strategy} x{self.world}"


@dataclass
class Row:
    """The outcome of one failure; seconds are since the failure.

    Attributes:
        report_problems: what is wrong with the failure report.
        problems: what else is wrong.
        same: whether the run ended with the same model as an uninterrupted run.
    """

    case: Case
    kind: str
    lost: int = 0
    report: str = ""
    report_s: float | None = None
    next_step_s: float | None = None
    report_problems: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    same: bool = True

    @property
    def is_correct(self) -> bool:
        return self.same and not self.report_problems and not self.problems

    @property
    def saved_by(self) -> str:
        """Return which rank saved: "rank 0", "another" or "none"."""
        if found := re.search(
            r"step \d+ was (?:already )?saved(?: by rank (\d+))?|saves the last step", self.report
        ):
            return "rank 0" if found[1] == "0" else "another"
        return "none"

    @property
    def reason_not_saved(self) -> str:
        """Return the reason why no rank saved."""
        if found := _NOT_SAVED.search(self.report):
            return found[1]
        if self.kind == "nan":
            return "no save after a NaN"
        return "the only rank died" if self.case.world == 1 else "no reason in the report"

    def __str__(self) -> str:
        seconds = "-" if self.next_step_s is None else f"{self.next_step_s:.1f}"
        wrong = [*self.report_problems, *self.problems, *([] if self.same else ["different hash"])]
        facts = f"{self.case.seed:>6} {self.case.name:<20} {self.kind:<7} {self.lost:>3} lost {seconds:>6} s"
        return f"  {facts}  {'; '.join(wrong) or 'correct'}  [{self.report}]"


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line per kind of run and failure, and the reasons why no rank saved."""
    savers = ("rank 0", "another", "none")
    heads = ("runs", "report", *savers, "0 lost", "1 lost", ">1 lost", "hash", "correct", "s", "s p90")
    lines = [f"{'':<20} {'kind':<7} " + " ".join(f"{head:>7}" for head in heads)]
    for name, kind in sorted({(row.case.name, row.kind) for row in rows}):
        these = [row for row in rows if (row.case.name, row.kind) == (name, kind)]
        lost = [sum(row.lost == n for row in these) for n in (0, 1)]
        counts = (
            *(len(these), sum(not row.report_problems for row in these)),
            *(sum(row.saved_by == saver for row in these) for saver in savers),
            *(*lost, len(these) - sum(lost)),
            *(sum(row.same for row in these), sum(row.is_correct for row in these)),
        )
        times = sorted(row.next_step_s for row in these if row.next_step_s is not None) or [float("nan")]
        p90 = times[max(0, -(-9 * len(times) // 10) - 1)]
        seconds = f"{statistics.median(times):>7.1f} {p90:>7.1f}"
        lines.append(f"{name:<20} {kind:<7} " + " ".join(f"{count:>7}" for count in counts) + f" {seconds}")
    reasons = Counter((row.kind, row.reason_not_saved) for row in rows if row.saved_by == "none" and row.lost)
    lines += [f"{count} x {kind}, no rank saved: {reason}" for (kind, reason), count in reasons.items()]
    total_lost = sum(row.lost for row in rows)
    right = sum(row.is_correct for row in rows)
    return [*lines, f"{right} of {len(rows)} failures handled correctly; {total_lost} steps lost"]
