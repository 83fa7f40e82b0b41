"""Predict all-reduces and steps at any world size: `python -m planner.comm --hosts 512 ...`.

Simulates the schedules on the links that `trainer.comm.preflight --json FILE` measured, or on given ones;
prints time, traffic and the best choice. `--train RUN` takes computing time and buckets from a former run,
and predicts its step on these links. `--formulas` prints the textbooks' traffic beside the schedules'.
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


# The options of each mode; it refuses all others, which it would ignore.
_WITH_FORMULAS = {"formulas", "hosts", "per_host", "megabytes", "servers"}
_NOT_WITH_TRAIN = {"megabytes", "servers", "wire_dtype"}
_MOST_RANKS = 65_536
_MOST_MESSAGES = 1 << 18  # between workers and servers: counted one by one, 20 us of CPU time each


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 2 for a user error."""
    options = parse(argv)
    try:
        _print(options)
    except argparse.ArgumentTypeError as error:  # --plot is checked when its plot is complete
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
        found = {count: world.exchange(count, num_bytes) for count in counts}
        print(f"\n{tables.exchanges(world, found, reduced)}")
    if options.plot:
        curves = {other.size: other.all_reduces(num_bytes) for other in plots.worlds(world)}
        plots.times(curves, f"all-reduce of {what}", options.per_host, options.plot)
        print(f"plot: {options.plot}")


def _train(options: argparse.Namespace, world: PlannedWorld) -> None:
    """The step of a former run, on other hosts and links."""
    run: step.MeasuredRun = options.run
    computed_s: float = options.computed_s
    megabytes = run.num_bytes / 1e6
    facts = (
        f"{options.train}: {run.title}: a step of {tables.seconds(run.step_s)}, "
        f"{tables.seconds(computed_s)} of it computing; {len(run.buckets)} buckets, {megabytes:.3g} MB"
    )
    print(f"{facts}\n\n{tables.steps(world.size, run.steps(world, computed_s))}")
    if options.plot:
        curves = {other.size: run.steps(other, computed_s) for other in plots.worlds(world)}
        title = f"{megabytes:.3g} MB to move beside {tables.seconds(computed_s)} of computing"
        plots.efficiencies(curves, f"{title}, {options.per_host} processes on each host", options.plot)
        print(f"plot: {options.plot}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options and derived values: `world`, and with --train `run` and `computed_s`."""
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
            needed = f"must be microseconds from 0 to {entries.MOST:g}"
            parser.error(f"{_flag(name)} {value}: {needed}")
    if not 1 <= options.oversubscription <= entries.MOST:
        parser.error(f"--oversubscription {options.oversubscription}: must be from 1 to {entries.MOST:g}")
    if options.oversubscription > 1 and options.hosts_per_switch is None:
        parser.error("--oversubscription needs --hosts-per-switch, the hosts that share a trunk")
    if options.rails > options.per_host:
        parser.error(f"--rails {options.rails}: a process uses one; at most --per-host={options.per_host}")
    world_size = options.hosts * options.per_host
    if world_size > _MOST_RANKS:
        asked = f"--hosts {options.hosts} --per-host {options.per_host}"
        parser.error(f"{asked}: {world_size:,} processes, but at most {_MOST_RANKS:,} are supported")
    for word in filter(None, options.servers.split(",")):
        if why := _refusal(word, world_size):
            parser.error(f"--servers {word}: {why}")
        if options.formulas and word == "all":
            parser.error("--servers all: --formulas counts servers that are not workers; give their number")
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
            where_it_was = Machine(**_from_file(options)) if options.results else None
            options.run = step.read(options.train)
            options.computed_s = options.run.computed_s(where_it_was)
    except (OSError, ValueError) as error:
        parser.error(f"--train {options.train}: {error}")
    return options


def _refusal(servers: str, world_size: int) -> str:
    """Why this number of servers cannot be predicted; "" if they can."""
    if world_size == 1:
        return "needs one process or more beside the servers: raise --hosts or --per-host"
    if servers != "all" and not (servers.isdecimal() and 0 < int(servers) < world_size):
        return f"must be all, or from 1 to {world_size - 1}: one rank must work"
    count = world_size if servers == "all" else int(servers)
    messages = count * (world_size - 1 if servers == "all" else world_size - count)
    if messages <= _MOST_MESSAGES:
        return ""
    return (
        f"has {messages:,} messages each way, but at most {_MOST_MESSAGES:,} are supported, since each is "
        "counted; ask for fewer servers or processes"
    )


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits if one is given that --formulas or --train does not use."""
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
        parser.error(f"{'--formulas' if options.formulas else '--train'} takes no {flags}: leave it out")
    return options


def _flag(name: str) -> str:
    return {"results": "--from"}.get(name, f"--{name.replace('_', '-')}")


def _declare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=int, required=True)
    add("--per-host", type=int, default=1, help="processes on each host (1)")
    add("--megabytes", type=float, default=25.0, help="10^6 bytes of fp32 (25)")
    add("--wire-dtype", choices=_ITEMSIZE, default="fp32", help="the dtype in which they are sent (fp32)")
    add("--segment-mb", type=float, default=SEGMENT_MB, help="as comm.segment_mb: 2^20 bytes a segment (2)")
    add("--from", type=Path, dest="results", metavar="FILE", help="written by the preflight with --json")
    add("--gbit", type=float, help="of each link of a host, in each direction")
    add("--latency-us", type=float, help="of a message between hosts, one way")
    add("--rails", type=int, default=1, help="links of each host, each for one of its processes (1)")
    add("--hosts-per-switch", type=int, help="hosts on one switch, numbered consecutively (all)")
    add("--oversubscription", type=float, default=1.0, help="links of a switch's hosts : its trunk (1)")
    add("--local-gbit", type=float, help="from one process to another of its host")
    add("--local-latency-us", type=float, help="of a message within a host")
    add("--message-us", type=float, help="CPU time to send or receive a message")
    add("--servers", default="", metavar="1,2,all", help="numbers of parameter servers to predict, too")
    add("--train", type=Path, metavar="RUN", help="predict the step of the run in this directory")
    add("--formulas", action="store_true", help="print the classic traffic table; needs no link")
    add("--plot", type=plots.file, metavar="FILE", help="draw it over world size (.png, .svg or .pdf)")


def _from_file(options: argparse.Namespace) -> dict[str, Any]:
    return measured(entries.read(options.results)) if options.results else {}


def _machine(options: argparse.Namespace) -> Machine:
    """The machine as measured; values given by hand take precedence."""
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
    by_hand = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    by_hand = {**_from_file(options), **by_hand}
    needed: dict[str, str] = {}
    if options.hosts > 1:
        needed |= {"--gbit": "link_bytes_per_s", "--latency-us": "latency_s"}
    if options.per_host > 1:
        needed |= {"--local-latency-us": "local_latency_s"}
        if "local_copy_s_per_byte" not in by_hand:
            needed |= {"--local-gbit": "local_bytes_per_s"}
    if missing := [option for option, name in needed.items() if name not in by_hand]:
        raise ValueError(f"{', '.join(missing)} missing: set it, or --from a preflight with such links")
    return Machine(**by_hand)


def _servers(options: argparse.Namespace, world_size: int) -> list[int]:
    """The numbers of servers to predict; as many as ranks means all of them, which are workers too."""
    return [world_size if word == "all" else int(word) for word in options.servers.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
