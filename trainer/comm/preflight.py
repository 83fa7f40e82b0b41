"""Check the network before a long job: `torchrun ... -m trainer.comm.preflight`.

The ranks connect and watch each other as in training. Every host connects to every other host. Then the ranks
run every operation that training needs on values with a known result, measure all links between hosts, and
print one table on rank 0. The exit status is 1 if two hosts cannot connect, if a result is wrong, or if a
link is slower than `--min-gbit`; the output names the hosts. If a rank does not start, fails, or keeps the
others waiting longer than `--timeout-s`, the preflight ends like a training run, with a failure report and
the same exit status.
"""

import argparse
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainer import accelerator
from trainer.comm.preflight_checks import OPERATIONS, GroupRank, check, measure_costs, measure_links, rounds
from trainer.config import DistributedConfig
from trainer.distributed.agreement import Agreement
from trainer.distributed.collectives import gloo_group
from trainer.distributed.interfaces import gloo_listener
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, few_lines, first_line
from trainer.launch.exits import exits
from trainer.launch.new_process import has_launcher_on_host
from trainer.launch.rank_info import rank_info

_ENDS = ("source", "target")
_PASSED = (
    "all passed; to test the CPUs or GPUs as well, "
    "run the same torchrun command with -m trainer.exact.verify --minutes 10"
)
_SLOW = 1 / 10  # of the median; slower links get a warning


@dataclass(frozen=True)
class RankReport:
    """The results of one rank."""

    host_name: str
    address: str  # where gloo listens
    operations: dict[str, tuple[str, float]]  # by operation: what is wrong ("": nothing), and milliseconds
    links: list[dict[str, float]]  # the links that start at this rank
    costs: dict[str, float]


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # before anything can fail
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        where = f"gloo listens at {_address()}; the interfaces are {interfaces}"
        print(f"preflight: {socket.gethostname()}: {where}", file=sys.stderr, flush=True)
    with exits(), process_group(_settings(options), both_ways=True) as ranks:
        report = _report(ranks, options.timeout_s)
        passed = Agreement(ranks).decide_on_rank0(
            lambda: report, lambda reports: _conclude(ranks, reports, options)
        )
    return int(not passed)


def _conclude(ranks: Ranks, reports: list[RankReport], options: argparse.Namespace) -> bool:
    links = sorted((link for report in reports for link in report.links), key=lambda link: link["gbit_s"])
    problems = [
        f"{ranks.describe(rank)} on {report.host_name}: {operation}: {problem}"
        for rank, report in enumerate(reports)
        for operation, (problem, _) in report.operations.items()
        if problem
    ]
    between = [link for link in links if link["source"] != link["target"]]
    # Take the median of each host's fastest link (its last, since links are sorted), because one slow host
    # among three has most of the links.
    fastest = {link["source"]: link["gbit_s"] for link in between}
    typical = median(fastest.values()) if fastest else 0.0
    warnings = []
    for link in between:
        ends = [f"host {link[end]} ({reports[ranks.hosts.index(link[end])].host_name})" for end in _ENDS]
        speed = f"{' -> '.join(ends)}: {link['gbit_s']:.3g} Gbit/s is less than"
        if link["gbit_s"] < options.min_gbit:
            problems.append(f"{speed} --min-gbit {options.min_gbit:g}")
        elif link["gbit_s"] < _SLOW * typical:
            warnings.append(f"WARNING: {speed} a tenth of the median of all hosts, {typical:.3g} Gbit/s")
    conclusion = ["FAILED", *few_lines(problems)] if problems else [_PASSED]
    print("\n".join([_table(ranks, reports, links), "", *few_lines(warnings), *conclusion]), flush=True)
    if options.json is not None:
        _write(options.json, ranks, links, reports[0].costs, passed=not problems)
    return not problems


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.comm.preflight", description=__doc__)
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: nccl with a GPU, else gloo")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="seconds to wait for each answer (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, for planner.comm")
    slower = "fail if a link between hosts is slower than this, in Gbit/s (0)"
    parser.add_argument("--min-gbit", type=float, default=0.0, help=slower)
    options = parser.parse_args(argv)
    if not 0 <= options.min_gbit < float("inf"):
        parser.error(f"--min-gbit {options.min_gbit}: must be a number >= 0, in Gbit/s")
    if not 0 < options.timeout_s < float("inf"):
        parser.error(f"--timeout-s {options.timeout_s}: must be a positive number of seconds")
    return options


def _settings(options: argparse.Namespace) -> DistributedConfig:
    (kind, num_gpus), here = accelerator.found("auto"), rank_info()
    if options.backend == "nccl" and "nccl" not in accelerator.backend_of(torch.device(kind)):
        raise UserError("--backend nccl needs a GPU, but torch sees none here; use --backend gloo")
    num_ranks = here.local_world_size or 1
    if options.backend != "gloo" and has_launcher_on_host(here) and 0 < num_gpus < num_ranks:
        raise UserError(
            f"the preflight needs a GPU for each rank, but this host has {num_gpus} GPU(s) and {num_ranks} "
            f"ranks; start at most {num_gpus} processes per host, or use --backend gloo"
        )
    device = "cpu" if options.backend == "gloo" else "auto"
    return DistributedConfig(device, None, options.timeout_s, False, "env://", None, None)


def _report(ranks: Ranks, timeout_s: float) -> RankReport:
    # The default group waits an hour longer than timeout_s, so that the watch reports a hang first. Before
    # step 1, the watch can't tell which rank is behind unless the other ranks fail. So gloo's operations fail
    # after timeout_s, and after each NCCL operation, all ranks wait for each other through gloo.
    control = gloo_group(timeout_s, in_time=True)
    groups = {"cpu": control}
    me = GroupRank(ranks.rank, ranks.world_size, ranks.device, groups.get(ranks.device.type), control)
    operations = {}
    ranks_by_host = [[r for r, h in enumerate(ranks.hosts) if h == host] for host in sorted({*ranks.hosts})]
    for device in dict.fromkeys((ranks.device, torch.device("cpu"))):  # with NCCL, the trainer uses gloo, too
        group = replace(me, device=device, group=groups.get(device.type))
        for name in OPERATIONS if ranks.world_size > 1 else OPERATIONS[1:]:  # isend needs another rank
            ranks.heartbeat.enter("set_up")  # so that a rank that hangs in an operation is behind the others
            if ranks.is_main:  # if all ranks hang, only this line shows where
                print(f"preflight: {name} ({device.type})", file=sys.stderr, flush=True)
            try:
                problem = check(name, group)
                began = time.perf_counter()
                check(name, group)
                took_s = time.perf_counter() - began
                group.barrier()
            except RuntimeError as error:
                raise RuntimeError(f"{name}: {first_line(error)}") from error
            operations[f"{name} ({device.type})"] = problem, took_s * 1e3
    within = [(host, host) for host, here in enumerate(ranks_by_host) if len(here) > 1]
    if ranks.is_main:
        print(f"preflight: links ({ranks.device.type})", file=sys.stderr, flush=True)
    links = []
    for pairs in (within, *rounds(len(ranks_by_host))):
        ranks.heartbeat.enter("set_up")
        links += measure_links(me, pairs, ranks_by_host)
    return RankReport(socket.gethostname(), _address(), operations, links, measure_costs(me))


def _address() -> str:
    listener = gloo_listener()
    if listener is None:
        return "-"
    with listener:
        return str(listener.getsockname()[0])


def _table(ranks: Ranks, reports: list[RankReport], links: list[dict[str, float]]) -> str:
    hosts = [
        f"{host:<6}{ranks.hosts.count(host):<8}{reports[ranks.hosts.index(host)].address:<20}"
        f"{reports[ranks.hosts.index(host)].host_name}"
        for host in sorted({*ranks.hosts})
    ]
    operations = []
    for name in reports[0].operations:
        failed = [rank for rank, report in enumerate(reports) if report.operations[name][0]]
        slowest_ms = max(report.operations[name][1] for report in reports)
        operations.append(f"{name:<24}{slowest_ms:>9.2f}  {f'FAIL on ranks {failed}' if failed else 'pass'}")
    rows = []
    for link in links:
        ends = f"{link['source']} -> {link['target']}"
        rows.append(f"{ends:<16}{link['latency_us']:>12.0f}{link['gbit_s']:>10.3g}")
    return "\n".join(
        [
            f"preflight: {ranks.num_hosts} hosts, {ranks.world_size} processes, {ranks.backend} on "
            f"{ranks.device.type}, torch {torch.__version__}\n",
            *(f"{'host':<6}{'ranks':<8}{'gloo listens at':<20}name", *few_lines(hosts)),
            *(f"\n{'operation':<24}{'ms':>9}  result", *operations),
            *(f"\n{'link (hosts)':<16}{'latency us':>12}{'Gbit/s':>10}  (slowest first)", *few_lines(rows)),
        ]
    )


def _write(file: Path, ranks: Ranks, links: Any, costs: dict[str, float], passed: bool) -> None:
    results = {"passed": passed, "device": ranks.device.type, "links": links, "costs": costs}
    try:
        file.write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {file} cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
