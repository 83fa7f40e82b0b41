"""Inject each kind of failure, and check the report, the time until all processes end, and the restart.

Trains the MLP on the bundled digits under torchrun with --max-restarts=1, as a user would, once
uninterrupted and once with each failure, and prints a row for each. `right` means that failure.json names the
rank, the phase and the step of the failure. The seconds are from the failure to the report, and to the end of
all processes of that attempt. `lost` counts the steps that were repeated. The exit status is 1 if a row is
wrong.

    python -m benchmarks.drill
    python -m benchmarks.drill --strategies ddp --comm ring --faults kill,stop --phase all_reduce
    python -m benchmarks.drill --hosts 2 --faults cut

With --hosts 2, two ranks run in each of two network namespaces, which needs root; `cut` disconnects the
second at the switch, so that packets are lost without an error.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.drilled_run import Case, Outcome, Start, attempt, by_the_door, on, torchrun
from tests.hosts import Host, hosts

FAULTS = ("kill", "stop", "raise", "hang", "exit", "slow", "nan", "diverge")


def cases(strategies: Sequence[str], comms: Sequence[str], faults: Sequence[str], phase: str) -> list[Case]:
    """Return the cases for each strategy and comm, an uninterrupted case first; fsdp has no comm."""
    found = []
    for strategy in strategies:
        for comm in comms if strategy == "ddp" else ["native"]:
            found.append(Case(strategy, comm, "none"))
            # Shards have no replicas, which could differ.
            kinds = [fault for fault in faults if strategy == "ddp" or fault != "diverge"]
            found += [Case(strategy, comm, fault, phase) for fault in kinds]
    return found


HEADER = (
    f"{'':<16} {'fault':<8} {'right':<6} {'report s':>9} {'gone s':>7}  {'went on':<12} {'lost':<5} "
    f"{'equal':<6} notes"
)


def row(case: Case, outcome: Outcome, problems: Sequence[str], equal: bool) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    wrong = [problem for problem in problems if problem != "another hash"]
    times = f"{seconds(outcome.report_s):>9} {seconds(outcome.end_s):>7}"
    lost = "-" if outcome.lost is None else outcome.lost
    went_on = f"{outcome.went_on:<12} {lost:<5} {'yes' if equal else 'no':<6}"
    right = "no" if wrong else "yes"
    return f"{case.name:<16} {case.fault:<8} {right:<6} {times}  {went_on} {'; '.join(wrong)}".rstrip()


def drill(
    todo: Sequence[Case], start: Start, folder: Path, timeout_s: float = 10.0
) -> list[tuple[Case, list[str]]]:
    """Run the cases, print a row for each, and return the problems of each failed case.

    Args:
        todo: for each strategy and all-reduce, the uninterrupted run must come first.
        timeout_s: `distributed.timeout_s` of the runs.
    """
    wrong, hashes = [], dict[str, str]()
    print(HEADER, flush=True)
    for number, case in enumerate(todo):
        here = folder / f"{number:02d}-{case.strategy}-{case.comm}-{case.fault}"
        outcome = attempt(case, start, here, timeout_s)
        if case.fault == "none":
            if outcome.sha256 is None:
                raise RuntimeError("the undisturbed run failed:\n" + outcome.outputs[0][-3000:])
            hashes[case.name] = outcome.sha256
            print(f"{case.name:<16} none     {outcome.sha256[:12]}", flush=True)
            continue
        problems = outcome.problems(case, hashes[case.name], timeout_s)
        print(row(case, outcome, problems, outcome.sha256 == hashes[case.name]), flush=True)
        if problems:
            wrong.append((case, problems))
            print(f"    see {here}", file=sys.stderr, flush=True)
    return wrong


def _some_of(*known: str) -> Callable[[str], list[str]]:
    def some(text: str) -> list[str]:
        given = text.split(",")
        for value in given:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value} is not one of {', '.join(known)}")
        return given

    return some


def main(todo: Sequence[Case], start: Start, out: Path | None, timeout_s: float) -> int:
    """Run the drill, and return the exit status."""
    with by_the_door(), contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        wrong = drill(todo, start, folder, timeout_s)
    num_faults = sum(case.fault != "none" for case in todo)
    print(f"{num_faults - len(wrong)} of {num_faults} as they should be")
    return 1 if wrong else 0


def cutting(case: Case, members: Sequence[Host]) -> Case:
    """Return the case; a cut disconnects the second host, by its first rank."""
    if case.fault != "cut":
        return case
    return replace(case, command=f"ip -n {members[1].switch} link set {members[1].port} down")


def _main() -> None:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--strategies", type=_some_of("ddp", "fsdp"), default="ddp,fsdp")
    known.add_argument("--comm", type=_some_of(), default="native,ring,hierarchical", help="for both")
    known.add_argument("--faults", type=_some_of(*FAULTS, "cut"), default=",".join(FAULTS))
    known.add_argument("--phase", default="forward", help="phase in which the failure is injected")
    known.add_argument(
        "--count", type=int, default=1, help="number of ranks that fail at once, from rank 1 on"
    )
    known.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    known.add_argument("--timeout-s", type=float, default=10.0, help="distributed.timeout_s of the runs")
    known.add_argument("--out", type=Path, help="where the runs and their output are kept")
    asked = known.parse_args()
    todo = cases(asked.strategies, asked.comm, asked.faults, asked.phase)
    todo = [replace(case, count=asked.count) for case in todo]
    with contextlib.ExitStack() as stack:
        start = torchrun(4)
        if asked.hosts == 2:
            pair = stack.enter_context(hosts(2))
            todo = [cutting(replace(case, rank=2 if case.fault == "cut" else 1), pair) for case in todo]
            start = on(pair, 2, "--max-restarts=1")
        sys.exit(main(todo, start, asked.out, asked.timeout_s))


if __name__ == "__main__":
    _main()
