"""Predict all-reduces and steps at any world size: `python -m planner.comm --hosts 512 ...`.

The schedules are simulated on the links that `trainer.comm.preflight --json FILE` measured, or on links given
by options. The output contains time, traffic and the fastest algorithm. `--train RUN` takes the computing
time and the buckets of a previous run, and predicts the time of its steps on these links. `--formulas`
compares the schedules' traffic with textbook formulas.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner import entries, formulas, plots, step, tables
from planner.cost_model import Machine, measured
from planner.world import PlannedWorld
from trainer.comm.algorithms.pipeline import SEGMENT_MB

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_POSITIVE = (
    "hosts",
    "per_host",
    "megabytes",
    "segment_mb",
    "gbit",
    "local_gbit",
    "rails",
    "hosts_per_switch",
)
_MICROSECONDS = ("latency_us", "local_latency_us", "message_us")


# The options of each mode; other options are errors.
_WITH_FORMULAS = {"formulas", "hosts", "per_host", "megabytes", "servers"}
_NOT_WITH_TRAIN = {"megabytes", "servers", "wire_dtype"}
_MAX_RANKS = 65_536
_MAX_MESSAGES = 1 << 18  # between workers and servers: each takes 20 us of CPU time to count


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status: 0, or 2 for a user error."""
    options = parse(argv)
    try:
        _print(options)
    except argparse.ArgumentTypeError as error:  # of --plot, when the file is written
        print(error, file=sys.stderr)
        return 2
    return 0


def _print(options: argparse.Namespace) -> None:
    if options.formulas:
        size = options.hosts * options.per_host
        hosts = [rank // options.per_host for rank in range(size)]
        dedicated = _servers(options, size)
        print(formulas.table(hosts, round(options.megabytes * 1e6), dedicated))
        return
    world: PlannedWorld = options.world
    print(tables.heading(world, "measured by the preflight" if options.results else "given"))
    if options.train:
        _train(options, world)
        return
    num_bytes, what = options.megabytes * 1e6, f"{options.megabytes:g} MB as {options.wire_dtype}"
    reduced = world.all_reduces(num_bytes)
    print(f"\n{tables.all_reduces(what, reduced)}")
    if counts := _servers(options, world.size):
        exchanges = {count: world.exchange(count, num_bytes) for count in counts}
        print(f"\n{tables.exchanges(world, exchanges, reduced)}")
    if options.plot:
        curves = {other.size: other.all_reduces(num_bytes) for other in plots.worlds(world)}
        plots.times(curves, f"all-reduce of {what}", options.per_host, options.plot)
        print(f"plot: {options.plot}")


def _train(options: argparse.Namespace, world: PlannedWorld) -> None:
    run: step.MeasuredRun = options.run
    computed_s: float = options.computed_s
    megabytes = run.num_bytes / 1e6
    facts = (
        f"{options.train}: {run.title}: step time {tables.seconds(run.step_s)} "
        f"({tables.seconds(computed_s)} computing), {len(run.buckets)} buckets, {megabytes:.3g} MB"
    )
    print(f"{facts}\n\n{tables.steps(world.size, run.steps(world, computed_s))}")
    if options.plot:
        curves = {other.size: run.steps(other, computed_s) for other in plots.worlds(world)}
        title = f"{megabytes:.3g} MB of gradients, {tables.seconds(computed_s)} of computing"
        plots.efficiencies(curves, f"{title}, {options.per_host} processes on each host", options.plot)
        print(f"plot: {options.plot}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and add `world`, and if --train is given, also `run` and `computed_s`."""
    parser = argparse.ArgumentParser(prog="python -m planner.comm", description=__doc__)
    _declare(parser)
    options = _parsed(parser, argv)
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and not 0 < value <= entries.MOST:
            parser.error(f"{_flag(name)} {value}: must be positive and at most {entries.MOST:g}")
    for name in _MICROSECONDS:
        value = getattr(options, name)
        if value is not None and not 0 <= value <= entries.MOST:
            parser.error(f"{_flag(name)} {value}: must be microseconds from 0 to {entries.MOST:g}")
    if not 1 <= options.oversubscription <= entries.MOST:
        parser.error(f"--oversubscription {options.oversubscription}: must be from 1 to {entries.MOST:g}")
    if options.oversubscription > 1 and options.hosts_per_switch is None:
        parser.error("--oversubscription needs --hosts-per-switch, the number of hosts that share a trunk")
    if options.rails > options.per_host:
        parser.error(
            f"--rails {options.rails}: must be at most --per-host {options.per_host}, because each process "
            "uses one"
        )
    world_size = options.hosts * options.per_host
    if world_size > _MAX_RANKS:
        given = f"--hosts {options.hosts} --per-host {options.per_host}"
        parser.error(f"{given}: {world_size:,} processes, but at most {_MAX_RANKS:,} are supported")
    for word in filter(None, options.servers.split(",")):
        if problem := _problem_of_servers(word, world_size):
            parser.error(f"--servers {word}: {problem}")
        if options.formulas and word == "all":
            parser.error("--servers all is not supported with --formulas; give the number of servers")
    if options.formulas:
        return options
    try:
        itemsize = _ITEMSIZE[options.wire_dtype]
        segment_bytes = max(itemsize, round(options.segment_mb * (1 << 20)))
        options.world = PlannedWorld(
            options.hosts, options.per_host, _machine(options), itemsize, segment_bytes
        )
    except (OSError, ValueError) as error:
        parser.error(f"--from {options.results}: {error}" if options.results else str(error))
    try:
        if options.train:
            machine_of_run = Machine(**_from_file(options)) if options.results else None
            options.run = step.read(options.train)
            options.computed_s = options.run.computed_s(machine_of_run)
    except (OSError, ValueError) as error:
        parser.error(f"--train {options.train}: {error}")
    return options


def _problem_of_servers(servers: str, world_size: int) -> str:
    """Return why the planner cannot predict this number of servers; "" if it can."""
    if world_size == 1:
        return "needs at least one process that is not a server; raise --hosts or --per-host"
    if servers != "all" and not (servers.isdecimal() and 0 < int(servers) < world_size):
        return f"must be all, or from 1 to {world_size - 1}, because at least one rank must be a worker"
    count = world_size if servers == "all" else int(servers)
    messages = count * (world_size - 1 if servers == "all" else world_size - count)
    if messages <= _MAX_MESSAGES:
        return ""
    return (
        f"has {messages:,} messages in each direction, but at most {_MAX_MESSAGES:,} are supported; use "
        "fewer servers or processes"
    )


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options; exit if --formulas or --train does not support one of them."""
    not_given = object()
    names = set(vars(parser.parse_args(["--hosts", "1"])))
    options = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, not_given)))
    given = {name for name in names if getattr(options, name) is not not_given}
    for name in names - given:
        setattr(options, name, parser.get_default(name))
    ignored = (
        given - _WITH_FORMULAS if options.formulas else given & _NOT_WITH_TRAIN if options.train else set()
    )
    if ignored:
        flags = ", ".join(sorted(map(_flag, ignored)))
        parser.error(f"{'--formulas' if options.formulas else '--train'} does not support {flags}; remove it")
    return options


def _flag(name: str) -> str:
    return {"results": "--from"}.get(name, f"--{name.replace('_', '-')}")


def _declare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=int, required=True, help="number of hosts")
    add("--per-host", type=int, default=1, help="processes on each host (default: 1)")
    add(
        "--megabytes",
        type=float,
        default=25.0,
        help="size of the all-reduce: 10^6 bytes of fp32 (default: 25)",
    )
    add(
        "--wire-dtype",
        choices=_ITEMSIZE,
        default="fp32",
        help="dtype in which gradients are sent (default: fp32)",
    )
    add(
        "--segment-mb",
        type=float,
        default=SEGMENT_MB,
        help="segment size in 2^20 bytes, as comm.segment_mb (default: 2)",
    )
    add("--from", type=Path, dest="results", metavar="FILE", help="output of the preflight with --json")
    add("--gbit", type=float, help="bandwidth in Gbit/s of each link of a host, in each direction")
    add("--latency-us", type=float, help="one-way latency of a message between hosts")
    add("--rails", type=int, default=1, help="links per host, shared by its processes (default: 1)")
    add("--hosts-per-switch", type=int, help="hosts on each switch, numbered consecutively (default: all)")
    add(
        "--oversubscription",
        type=float,
        default=1.0,
        help="bandwidth of a switch's links to hosts, divided by that of its trunk (default: 1)",
    )
    add("--local-gbit", type=float, help="bandwidth in Gbit/s between processes on a host")
    add("--local-latency-us", type=float, help="latency of a message within a host")
    add("--message-us", type=float, help="CPU time to send or receive a message")
    add("--servers", default="", metavar="1,2,all", help="also predict these numbers of parameter servers")
    add("--train", type=Path, metavar="RUN", help="predict the step of the run in this directory")
    add("--formulas", action="store_true", help="print textbook formulas for the traffic; needs no links")
    add(
        "--plot",
        type=plots.file,
        metavar="FILE",
        help="plot the prediction over world size (.png, .svg or .pdf)",
    )


def _from_file(options: argparse.Namespace) -> dict[str, Any]:
    return measured(entries.read(options.results)) if options.results else {}


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine that --from describes; other options replace measured values."""
    given = {
        "latency_s": (options.latency_us, 1e-6),
        "link_bytes_per_s": (options.gbit, 1 / 8e-9),
        "local_latency_s": (options.local_latency_us, 1e-6),
        "local_bytes_per_s": (options.local_gbit, 1 / 8e-9),
        "message_s": (options.message_us, 1e-6),
        "rails": (options.rails, 1),
        "hosts_per_switch": (options.hosts_per_switch, 1),
        "oversubscription": (options.oversubscription, 1),
    }
    values = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    values = {**_from_file(options), **values}
    needed: dict[str, str] = {}
    if options.hosts > 1:
        needed |= {"--gbit": "link_bytes_per_s", "--latency-us": "latency_s"}
    if options.per_host > 1:
        needed |= {"--local-latency-us": "local_latency_s"}
        if "local_copy_s_per_byte" not in values:
            needed |= {"--local-gbit": "local_bytes_per_s"}
    if missing := [option for option, name in needed.items() if name not in values]:
        raise ValueError(
            f"{', '.join(missing)} missing; set these options, or pass --from FILE, where FILE was written "
            "by `python -m trainer.comm.preflight --json FILE` on hosts with the links to simulate"
        )
    return Machine(**values)


def _servers(options: argparse.Namespace, world_size: int) -> list[int]:
    """Return the numbers of servers to predict; for `world_size`, every rank is a server and a worker."""
    return [world_size if word == "all" else int(word) for word in options.servers.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
