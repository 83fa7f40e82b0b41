"""Every fault, one after another, on this machine: the verdict, the time until all end, and the restart.

Trains the MLP on the embedded digits under torchrun with --max-restarts=1, as a user would, once undisturbed
and once for each fault, and prints a table with a row for each. `right` means that failure.json names the
rank, the phase and the step of the fault; the seconds are from the fault to the verdict, and until each
process of that attempt has ended; `lost` counts the steps that were made again. Exit status 1 if any row is
wrong.

    python -m trainer.faults.drill
    python -m trainer.faults.drill --strategies ddp --comm ring --faults kill,stop --phase all_reduce
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.faults.injection.drilled_run import Case, Outcome, Start, attempt, by_the_door, torchrun

FAULTS = ("kill", "stop", "raise", "hang", "exit", "slow", "nan", "diverge")
BATCH = 64  # train.global_batch_size of the preset


def cases(strategies: Sequence[str], comms: Sequence[str], faults: Sequence[str], phase: str) -> list[Case]:
    """The undisturbed case first, for each strategy and choice of comm."""
    found = []
    for strategy in strategies:
        for comm in comms:
            found.append(Case(strategy, comm, "none"))
            # A shard has no replica to differ from.
            kinds = [fault for fault in faults if strategy == "ddp" or fault != "diverge"]
            found += [Case(strategy, comm, fault, phase) for fault in kinds]
    return found


HEADER = (
    f"{'':<16} {'fault':<8} {'right':<6} {'verdict s':>9} {'gone s':>7}  {'went on':<12} {'lost':<5} "
    f"{'equal':<6} notes"
)


def row(case: Case, outcome: Outcome, problems: Sequence[str], equal: bool) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    wrong = [problem for problem in problems if problem != "another hash"]
    times = f"{seconds(outcome.verdict_s):>9} {seconds(outcome.end_s):>7}"
    lost = "-" if outcome.lost is None else outcome.lost
    went_on = f"{outcome.went_on:<12} {lost:<5} {'yes' if equal else 'no':<6}"
    right = "no" if wrong else "yes"
    return f"{case.name:<16} {case.fault:<8} {right:<6} {times}  {went_on} {'; '.join(wrong)}".rstrip()


def drill(
    todo: Sequence[Case], start: Start, folder: Path, timeout_s: float = 10.0
) -> list[tuple[Case, list[str]]]:
    """Run the cases, print a row for each; return the problems of each faulty case.

    Args:
        todo: for each strategy and all-reduce, the undisturbed run must come first.
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


def parser(description: str | None, faults: Sequence[str]) -> argparse.ArgumentParser:
    """The command line of a drill; `faults` are the possible ones."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--strategies", type=_some_of("ddp", "fsdp"), default="ddp,fsdp")
    found.add_argument("--comm", type=_some_of(), default="native,ring,hierarchical", help="for both")
    found.add_argument("--faults", type=_some_of(*faults), default=",".join(faults))
    found.add_argument("--phase", default="forward", help="in which the fault is injected")
    found.add_argument("--timeout-s", type=float, default=10.0, help="distributed.timeout_s of the runs")
    found.add_argument("--out", type=Path, help="where the runs and their output are kept")
    return found


def _some_of(*known: str) -> Callable[[str], list[str]]:
    def some(text: str) -> list[str]:
        given = text.split(",")
        for value in given:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value} is not one of {', '.join(known)}")
        return given

    return some


def main(todo: Sequence[Case], start: Start, arguments: argparse.Namespace) -> int:
    """Run the drill, and return the exit status."""
    with by_the_door(), contextlib.ExitStack() as stack:
        folder = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        wrong = drill(todo, start, folder, arguments.timeout_s)
    num_faults = sum(case.fault != "none" for case in todo)
    print(f"{num_faults - len(wrong)} of {num_faults} as they should be")
    return 1 if wrong else 0


def fitting_batch(processes: int) -> str:
    """The largest batch, up to the preset's, that divides evenly over `processes` ranks."""
    return f"train.global_batch_size={BATCH // processes * processes}"


def _main() -> None:
    known = parser(__doc__, FAULTS)
    known.add_argument("--processes", type=int, default=4)
    known.add_argument("--count", type=int, default=1, help="so many ranks at once, from rank 1 on")
    arguments = known.parse_args()
    if arguments.processes < 2:
        known.error(f"--processes is {arguments.processes}, but must be at least 2: another rank sees it")
    if arguments.processes > BATCH:
        known.error(f"--processes is {arguments.processes}, but a batch has {BATCH} samples: at most {BATCH}")
    todo = cases(arguments.strategies, arguments.comm, arguments.faults, arguments.phase)
    batch = (fitting_batch(arguments.processes),)
    todo = [replace(case, count=arguments.count, overrides=batch) for case in todo]
    sys.exit(main(todo, torchrun(arguments.processes), arguments))


if __name__ == "__main__":
    _main()
