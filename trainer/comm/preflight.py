"""Checks the network before a long job: `torchrun ... -m trainer.comm.preflight`.

Runs every operation that training needs on values with a known result, measures the links between hosts,
and prints one table on rank 0. Exits with 1, and names rank, host and operation, if anything is wrong;
it never waits longer than `--timeout-s` for any one answer.

The verdict does not use the network under test but torchrun's store, and every operation has its own
deadline, so that a rank that hangs is noticed by itself and by the others.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.comm.network import interface
from trainer.comm.network.checks import CHECKS, NEED_TWO, OF_ALL, GroupRank, wrong
from trainer.comm.network.costs import measure_costs
from trainer.comm.network.join import JoinedRanks, JoinError, connect, deadline, find_ranks, write
from trainer.comm.network.link_speeds import measure_links
from trainer.comm.network.preflight_report import PreflightReport, RankReport

_GRACE_S = 2.0  # between the times at which two ranks notice a failure


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    try:
        with deadline(3 * options.timeout_s, lambda: _leave("the store of rank 0 does not answer")):
            joined = find_ranks(options.timeout_s)
    except JoinError as error:
        print(f"preflight: {error}", file=sys.stderr, flush=True)
        return 1
    report = RankReport()

    def give_up(operation: str) -> None:
        report.stopped_in, report.error = operation, f"no answer for {options.timeout_s + _GRACE_S:g} s"
        os._exit(_conclude(joined, report, options))

    try:
        _examine(joined, report, options, give_up)
    except Exception as error:  # the backends raise many types; each means that this operation failed here
        report.error = str(error).strip() or repr(error)
    code = _conclude(joined, report, options)
    if code == 0:
        dist.destroy_process_group()
    return code


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.comm.preflight", description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl with a GPU, else gloo")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="the longest wait for one answer (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, for planner.comm")
    options = parser.parse_args(argv)
    if not 0 < options.timeout_s < float("inf"):
        parser.error(f"--timeout-s {options.timeout_s}: must be a positive number of seconds")
    return options


def _examine(
    joined: JoinedRanks, report: RankReport, options: argparse.Namespace, give_up: Callable[[str], None]
) -> None:
    """Run everything; `report.stopped_in` always names the current operation."""

    @contextmanager
    def trying(operation: str, steps: int = 1) -> Iterator[None]:
        report.stopped_in = operation
        limit_s = steps * options.timeout_s + _GRACE_S  # gloo's own message is better: let it come first
        with deadline(limit_s, lambda: give_up(operation)):
            yield
        report.stopped_in = ""

    timeout = timedelta(seconds=options.timeout_s)
    report.interfaces = interface.interfaces()
    report.named = {
        name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ
    }
    with trying("connect"):
        me = connect(joined, options.backend, options.timeout_s)
    report.backend = f"{dist.get_backend()} on {me.device.type}"
    with trying("monitored_barrier"):
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        dist.monitored_barrier(control, timeout, wait_all_ranks=True)
    with trying("sub groups"):
        group = _sub_group(me)
    _check_operations(me, group, trying, report, "")
    if "nccl" in report.backend:  # the trainer uses gloo beside it
        on_host = replace(me, device=torch.device("cpu"), group=control)
        _check_operations(on_host, None, trying, report, " (gloo)")
    with trying("links between hosts", steps=len(set(joined.hosts)) + 1):
        report.links = measure_links(me, joined.ranks_by_host)
    with trying("costs of the processors", steps=2):
        report.costs = measure_costs(me, joined.ranks_by_host)
    if used := interface.in_use(without_port=int(joined.master.rpartition(":")[2] or 0)):
        report.interface, report.address = used
    with trying("monitored_barrier at the end"):
        dist.monitored_barrier(control, timeout, wait_all_ranks=True)


def _sub_group(me: GroupRank) -> GroupRank:
    """This rank among the even ones, or the odd."""
    found = me
    for parity in (0, 1):
        ranks = tuple(range(parity, me.world_size, 2))
        group = dist.new_group(ranks) if ranks else None
        if me.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = GroupRank(ranks.index(me.rank), len(ranks), me.device, group, ranks)
    return found


def _check_operations(
    me: GroupRank,
    sub_group: GroupRank | None,
    trying: Callable[[str], AbstractContextManager[None]],
    report: RankReport,
    suffix: str,
) -> None:
    """Run each operation on all ranks, then in `sub_group`, both halves of the ranks at once."""
    for name, check in CHECKS.items():
        if name in OF_ALL and sub_group is None:
            continue
        if name in NEED_TWO and me.world_size < 2:
            report.skipped[name + suffix] = "needs two ranks"
            continue
        with trying(name):
            try:
                fault = wrong(check(me))
            except (NotImplementedError, RuntimeError) as error:
                if "not support" not in str(error):
                    raise
                report.skipped[name + suffix] = "not supported by this backend"
                continue
            started = time.perf_counter()
            wrong(check(me))
            report.operations[name + suffix] = (fault or "", (time.perf_counter() - started) * 1e3)
            if sub_group is not None and name not in OF_ALL | (
                NEED_TWO if sub_group.world_size < 2 else set()
            ):
                report.in_sub_groups[name + suffix] = wrong(check(sub_group)) or ""


def _conclude(joined: JoinedRanks, report: RankReport, options: argparse.Namespace) -> int:
    """Send all reports to rank 0, which prints and decides; return the exit code of this process."""
    store, rank = joined.control, joined.rank
    # Rank 0 may notice a failure one deadline later than this rank, and then waits one more for the others.
    limit_s = 2 * options.timeout_s + 4 * _GRACE_S
    alone = (
        f"{joined.name(rank)} failed in {report.stopped_in or 'the end'}: {report.error}; "
        f"the store of rank 0 at {joined.master} does not answer either"
    )
    with deadline(limit_s + _GRACE_S, lambda: _leave(alone)):
        try:
            store.set(f"report/{rank}", report.dumps())
            if rank == 0:
                verdict = PreflightReport(joined, _reports(joined, options.timeout_s + 2 * _GRACE_S))
                print(verdict, flush=True)
                written = write(options.json, verdict.json())
                store.set("verdict", str(int(not (verdict.passed and written))))
            store.wait(["verdict"], timedelta(seconds=limit_s))
            return int(store.get("verdict"))
        except RuntimeError:
            print(f"preflight: {alone}", file=sys.stderr, flush=True)
            return 1


def _leave(message: str) -> None:
    # A store whose network is dead never returns from its own timeout: it waits for a confirmation.
    print(f"preflight: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _reports(joined: JoinedRanks, timeout_s: float) -> list[RankReport | None]:
    """All ranks' reports; None for a rank without one."""
    deadline = time.monotonic() + timeout_s
    reports: list[RankReport | None] = []
    for rank in range(joined.world_size):
        key = f"report/{rank}"
        with suppress(RuntimeError):
            joined.control.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        reports.append(RankReport.loads(joined.control.get(key)) if joined.control.check([key]) else None)
    return reports


if __name__ == "__main__":
    sys.exit(main())
