"""Inject each kind of failure, and check the report, the time until all processes end, and the restart.

Trains the MLP on the digits under torchrun with --max-restarts=1, as a user would, once uninterrupted and
once with each failure, and prints a row for each:

    correct     whether failure.json names the rank, the phase and the step of the failure
    report s    seconds from the failure to the report
    end s       seconds from the failure until all processes of that attempt have ended
    resumed by  torchrun, or a second launch
    lost        number of steps that were repeated
    same        whether the model equals that of the uninterrupted run

The exit status is 1 if a row is wrong.

    python -m benchmarks.drill
    python -m benchmarks.drill --strategies ddp --comm ring --failures kill,stop --phase all_reduce
    python -m benchmarks.drill --hosts 2 --failures cut

With --hosts 2, two ranks run in each of two network namespaces, which requires root. `cut` disconnects the
second one at the switch, so that packets are lost without an error.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.drilled_run import Case, Outcome, Start, attempt, exit_on_signals, on_hosts, torchrun
from tests.hosts import Host, hosts

FAILURES = ("kill", "stop", "raise", "hang", "exit", "slow", "nan", "diverge")


def cases(strategies: Sequence[str], comms: Sequence[str], failures: Sequence[str], phase: str) -> list[Case]:
    """Return the cases for each strategy and comm, an uninterrupted case first; fsdp has no comm."""
    found = []
    for strategy in strategies:
        for comm in comms if strategy == "ddp" else ["native"]:
            found.append(Case(strategy, comm, "none"))
            # Shards have no replicas, which could differ.
            kinds = [kind for kind in failures if strategy == "ddp" or kind != "diverge"]
            found += [Case(strategy, comm, kind, phase) for kind in kinds]
    return found


HEADER = (
    f"{'':<16} {'failure':<8} {'correct':<7} {'report s':>9} {'end s':>7}  {'resumed by':<13} {'lost':<5} "
    f"{'same':<5} problems"
)


def row(case: Case, outcome: Outcome, problems: Sequence[str], same: bool) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    wrong = [problem for problem in problems if problem != "different hash"]
    times = f"{seconds(outcome.report_s):>9} {seconds(outcome.end_s):>7}"
    lost = "-" if outcome.lost is None else outcome.lost
    resumed = f"{outcome.resumed_by:<13} {lost:<5} {'yes' if same else 'no':<5}"
    correct = "no" if wrong else "yes"
    return f"{case.name:<16} {case.failure:<8} {correct:<7} {times}  {resumed} {'; '.join(wrong)}".rstrip()


def drill(
    todo: Sequence[Case], start: Start, folder: Path, timeout_s: float = 10.0
) -> list[tuple[Case, list[str]]]:
    """Run the cases, print a row for each, and return the problems of each failed case.

    Args:
        todo: for each strategy and all-reduce, the uninterrupted run comes first.
        timeout_s: `distributed.timeout_s` of the runs.
    """
    wrong, hashes = [], dict[str, str]()
    print(HEADER, flush=True)
    for number, case in enumerate(todo):
        run_folder = folder / f"{number:02d}-{case.strategy}-{case.comm}-{case.failure}"
        outcome = attempt(case, start, run_folder, timeout_s)
        if case.failure == "none":
            if outcome.sha256 is None:
                raise RuntimeError("the uninterrupted run failed:\n" + outcome.outputs[0][-3000:])
            hashes[case.name] = outcome.sha256
            print(f"{case.name:<16} none     {outcome.sha256[:12]}", flush=True)
            continue
        problems = outcome.problems(case, hashes[case.name], timeout_s)
        print(row(case, outcome, problems, outcome.sha256 == hashes[case.name]), flush=True)
        if problems:
            wrong.append((case, problems))
            print(f"    see {run_folder}", file=sys.stderr, flush=True)
    return wrong


def _comma_separated(*known: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        given = text.split(",")
        for value in given:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value} is not one of {', '.join(known)}")
        return given

    return parse


def main(todo: Sequence[Case], start: Start, out: Path | None, timeout_s: float) -> int:
    """Run the drill, and return the exit status."""
    with exit_on_signals(), contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        wrong = drill(todo, start, folder, timeout_s)
    num_failures = sum(case.failure != "none" for case in todo)
    print(f"{num_failures - len(wrong)} of {num_failures} failures correctly reported and recovered from")
    return 1 if wrong else 0


def with_cut_command(case: Case, members: Sequence[Host]) -> Case:
    """Return the case with the command of a cut, which disconnects the second host."""
    if case.failure != "cut":
        return case
    return replace(case, command=f"ip -n {members[1].switch} link set {members[1].port} down")


def _main() -> None:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--strategies", type=_comma_separated("ddp", "fsdp"), default="ddp,fsdp")
    known.add_argument("--comm", type=_comma_separated(), default="native,ring,hierarchical", help="for ddp")
    known.add_argument("--failures", type=_comma_separated(*FAILURES, "cut"), default=",".join(FAILURES))
    known.add_argument("--phase", default="forward", help="phase in which the failure is injected")
    known.add_argument(
        "--count", type=int, default=1, help="number of ranks that fail at once, starting with rank 1"
    )
    known.add_argument("--hosts", type=int, default=1, choices=(1, 2))
    known.add_argument("--timeout-s", type=float, default=10.0, help="distributed.timeout_s of the runs")
    known.add_argument("--out", type=Path, help="folder for the runs and their output")
    options = known.parse_args()
    todo = cases(options.strategies, options.comm, options.failures, options.phase)
    todo = [replace(case, count=options.count) for case in todo]
    with contextlib.ExitStack() as stack:
        start = torchrun(4)
        if options.hosts == 2:
            pair = stack.enter_context(hosts(2))
            todo = [replace(case, rank=2 if case.failure == "cut" else 1) for case in todo]
            todo = [with_cut_command(case, pair) for case in todo]
            start = on_hosts(pair, 2, "--max-restarts=1")
        sys.exit(main(todo, start, options.out, options.timeout_s))


if __name__ == "__main__":
    _main()
