"""Predict all-reduces and parameter servers at any world size: `python -m trainer.comm.plan --hosts 512 ...`.

Simulates the schedules themselves on links that `trainer.comm.preflight --json FILE` measured, or as given;
prints time, traffic and the best choice. `--formulas` prints the textbooks' traffic beside the schedules'.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.comm.network.predict import Machine, Prediction, measured, predict
from trainer.comm.schedules import formulas
from trainer.comm.schedules.algorithms import ALGORITHMS, build
from trainer.comm.schedules.exchange import exchange
from trainer.comm.schedules.pipeline import SEGMENT_MB

BUCKET_MB = 4.0  # strategy.bucket_mb
_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.formulas:
        hosts = _places(options, options.hosts)
        dedicated = [count for count in _servers(options, len(hosts)) if count < len(hosts)]
        print(formulas.table(hosts, round(options.megabytes * 1e6), dedicated))
        return 0
    predictions = predict_all(options, options.hosts)
    print(table(options, predictions))
    if exchanges := predict_exchanges(options):
        print(f"\n{exchange_table(options, exchanges, predictions)}")
    if options.plot:
        worlds = sorted({1 << i for i in range(options.hosts.bit_length())} | {options.hosts})
        curves = {hosts: predict_all(options, hosts) for hosts in worlds[:-1]}
        draw(options, {**curves, options.hosts: predictions}, options.plot)
        print(f"plot: {options.plot}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.comm.plan", description=__doc__)
    add = parser.add_argument
    add("--hosts", type=int, required=True)
    add("--per-host", type=int, default=1, help="processes on each host (1)")
    add("--megabytes", type=float, default=25.0, help="10^6 bytes of fp32 gradients to all-reduce (25)")
    add("--wire-dtype", choices=_ITEMSIZE, default="fp32", help="what they travel as (fp32)")
    add("--segment-mb", type=float, default=SEGMENT_MB, help="as comm.segment_mb: 2^20 bytes a segment (2)")
    add("--from", type=Path, dest="figures", metavar="FILE", help="what the preflight wrote with --json")
    add("--gbit", type=float, help="of each host's link, in each direction")
    add("--latency-us", type=float, help="of a message between hosts, one way")
    add("--local-gbit", type=float, help="from one process to another of its host")
    add("--local-latency-us", type=float, help="of a message within a host")
    add("--message-us", type=float, help="what a process spends on sending or receiving any message")
    add("--servers", default="", metavar="1,2,all", help="predict parameter servers too, so many each")
    add("--formulas", action="store_true", help="print the classic traffic table; needs no link")
    add("--plot", type=Path, metavar="FILE", help="draw time over world size, log-log (.png, .svg or .pdf)")
    options = parser.parse_args(argv)
    for name in ("hosts", "per_host", "megabytes", "segment_mb", "gbit", "local_gbit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: a positive number is needed")
    for name in ("latency_us", "local_latency_us", "message_us"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: a number of microseconds is needed, 0 or more")
    world_size = options.hosts * options.per_host
    for word in filter(None, options.servers.split(",")):
        if word != "all" and not (word.isdecimal() and 0 < int(word) < world_size):
            parser.error(f"--servers {word}: all, or a number from 1 to {world_size - 1}: one rank must work")
    if options.formulas:
        return options
    try:
        options.machine = _machine(options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--from {options.figures}: {error}" if options.figures else str(error))
    return options


def _machine(options: argparse.Namespace) -> Machine:
    """What was measured, where nothing else is given by hand."""
    given = {
        "latency_s": (options.latency_us, 1e-6),
        "link_bytes_per_s": (options.gbit, 1 / 8e-9),
        "local_latency_s": (options.local_latency_us, 1e-6),
        "local_bytes_per_s": (options.local_gbit, 1 / 8e-9),
        "message_s": (options.message_us, 1e-6),
    }
    by_hand = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    if options.figures:
        by_hand = {**measured(json.loads(options.figures.read_text())), **by_hand}
    needed: dict[str, str] = {}
    if options.hosts > 1:
        needed |= {"--gbit": "link_bytes_per_s", "--latency-us": "latency_s"}
    if options.per_host > 1:
        needed |= {"--local-latency-us": "local_latency_s"}
        if "local_copy_s_per_byte" not in by_hand:
            needed |= {"--local-gbit": "local_bytes_per_s"}
    if missing := [option for option, name in needed.items() if name not in by_hand]:
        raise ValueError(f"{', '.join(missing)} missing: give it, or --from a preflight that saw such links")
    return Machine(**by_hand)


def predict_all(options: argparse.Namespace, num_hosts: int) -> dict[str, Prediction]:
    """Every algorithm on `num_hosts` hosts, fastest first."""
    hosts = _places(options, num_hosts)
    itemsize = _ITEMSIZE[options.wire_dtype]
    numel = max(1, round(options.megabytes * 1e6 / _ITEMSIZE["fp32"]))
    segment_bytes = max(itemsize, round(options.segment_mb * (1 << 20)))
    found = {}
    for algorithm in ALGORITHMS:
        schedules = [build(algorithm, rank, hosts) for rank in range(len(hosts))]
        found[algorithm] = predict(
            schedules, hosts, options.machine, numel * itemsize, itemsize, segment_bytes
        )
    return dict(sorted(found.items(), key=lambda item: item[1].seconds))


def _places(options: argparse.Namespace, num_hosts: int) -> tuple[int, ...]:
    """The host of every rank."""
    return tuple(rank // options.per_host for rank in range(num_hosts * options.per_host))


def _servers(options: argparse.Namespace, world_size: int) -> list[int]:
    """How many ranks serve, each time; as many as there are: all of them, which also work."""
    return [world_size if word == "all" else int(word) for word in options.servers.split(",") if word]


def predict_exchanges(options: argparse.Namespace) -> dict[int, tuple[Prediction, Prediction]]:
    """Push and pull of fp32 values, by the number of servers that --servers names."""
    hosts = _places(options, options.hosts)
    num_bytes = round(options.megabytes * 1e6)
    found = {}
    for count in _servers(options, len(hosts)):
        workers = range(len(hosts)) if count == len(hosts) else range(count, len(hosts))
        push, pull = exchange(range(count), workers)
        segment_bytes = round(BUCKET_MB * (1 << 20))
        found[count] = (
            predict(push, hosts, options.machine, num_bytes, segment_bytes=segment_bytes),
            predict(pull, hosts, options.machine, num_bytes, segment_bytes=segment_bytes),
        )
    return found


def exchange_table(
    options: argparse.Namespace,
    exchanges: dict[int, tuple[Prediction, Prediction]],
    predictions: dict[str, Prediction],
) -> str:
    world_size = options.hosts * options.per_host
    lines = [
        f"{'servers':<9}{'workers':<9}{'push':>11}{'pull':>11}{'both':>11}{'server sends':>14}  held up by"
    ]
    for count, (push, pull) in exchanges.items():
        everybody = count == world_size
        workers = world_size if everybody else world_size - count
        lines.append(
            f"{'all' if everybody else count:<9}{workers:<9}{_seconds(push.seconds):>11}"
            f"{_seconds(pull.seconds):>11}{_seconds(push.seconds + pull.seconds):>11}"
            f"{_bytes(pull.traffic.sent[0]):>14}  {push.bottleneck}"
        )
    (best, first), *_ = predictions.items()
    fastest = min(exchanges.values(), key=lambda ways: ways[0].seconds + ways[1].seconds)
    ratio = (fastest[0].seconds + fastest[1].seconds) / first.seconds if first.seconds else 1.0
    lines.append(
        f"the fastest of them takes {ratio:.2f} x the time of comm={best}, before any of it is hidden"
    )
    return "\n".join(lines)


def table(options: argparse.Namespace, predictions: dict[str, Prediction]) -> str:
    """What a person reads; the most that any rank or host sends."""
    machine: Machine = options.machine
    lines = [
        f"{options.hosts} hosts x {options.per_host} processes, {options.megabytes:g} MB of gradients "
        f"sent as {options.wire_dtype}",
        f"between hosts {machine.link_bytes_per_s * 8e-9:.3g} Gbit/s and {machine.latency_s * 1e6:.3g} us, "
        + ("measured by the preflight" if options.figures else "given"),
        "",
        f"{'algorithm':<18}{'time':>11}{'sent by rank':>15}{'by host link':>15}{'in all':>12}  held up by",
    ]
    for algorithm, prediction in predictions.items():
        traffic = prediction.traffic
        lines.append(
            f"{algorithm:<18}{_seconds(prediction.seconds):>11}{_bytes(max(traffic.sent)):>15}"
            f"{_bytes(max(traffic.host_sent)):>15}{_bytes(sum(traffic.sent)):>12}  {prediction.bottleneck}"
        )
    (best, first), (second, next_) = list(predictions.items())[:2]
    ratio = next_.seconds / first.seconds if first.seconds else 1.0
    lines += ["", f"best: comm={best}, {ratio:.2f} x as fast as {second}"]
    return "\n".join(lines)


def draw(options: argparse.Namespace, curves: dict[int, dict[str, Prediction]], file: Path) -> None:
    """Time over world size, both on logarithmic axes, one line for each algorithm."""
    from matplotlib.figure import Figure  # takes a second to import, and only a picture needs it

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log",
        yscale="log",
        xlabel=f"world size (processes, {options.per_host} on each host)",
        ylabel="predicted time of one all-reduce (s)",
        title=f"All-reduce of {options.megabytes:g} MB sent as {options.wire_dtype}",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    for algorithm, marker in zip(ALGORITHMS, "os^Dv", strict=True):
        seconds = {hosts * options.per_host: curves[hosts][algorithm].seconds for hosts in sorted(curves)}
        seconds = {world: value for world, value in seconds.items() if value > 0}
        axes.plot(list(seconds), list(seconds.values()), marker=marker, label=algorithm)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


if __name__ == "__main__":
    sys.exit(main())
