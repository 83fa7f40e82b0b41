"""Predictions as tables for people."""

from collections.abc import Mapping

from planner.cost_model import Prediction
from planner.step import PredictedStep
from planner.world import PlannedWorld


def heading(world: PlannedWorld, given: str) -> str:
    machine = world.machine
    rate, latency = machine.link_bytes_per_s * 8e-9, machine.latency_s * 1e6
    lines = [f"{world.num_hosts} hosts x {world.per_host} processes"]
    if world.num_hosts == 1:
        return f"{lines[0]}, no links between hosts"
    lines.append(f"between hosts {rate:.3g} Gbit/s and {latency:.3g} us, {given}")
    if machine.rails > 1:
        lines.append(f"{machine.rails} such links for each host, shared by its processes")
    if machine.oversubscription != 1:
        lines.append(
            f"{machine.hosts_per_switch} hosts to a switch, whose trunk has 1/{machine.oversubscription:g} "
            "of the bandwidth of their links"
        )
    return "\n".join(lines)


def all_reduces(what: str, predictions: Mapping[str, Prediction]) -> str:
    """Time and traffic: the most that any rank or host sends."""
    lines = [
        f"all-reduce of {what}",
        f"{'algorithm':<18}{'time':>11}{'sent by rank':>15}{'by host':>12}{'in all':>12}  held up by",
    ]
    for algorithm, prediction in predictions.items():
        traffic = prediction.traffic
        lines.append(
            f"{algorithm:<18}{seconds(prediction.seconds):>11}{_bytes(max(traffic.sent)):>15}"
            f"{_bytes(max(traffic.host_sent)):>12}{_bytes(sum(traffic.sent)):>12}  {prediction.bottleneck}"
        )
    (best, first), (second, next_) = list(predictions.items())[:2]
    ratio = next_.seconds / first.seconds if first.seconds else 1.0
    return "\n".join([*lines, "", f"best: comm={best}, {ratio:.2f} x as fast as {second}"])


def exchanges(
    world: PlannedWorld,
    found: Mapping[int, tuple[Prediction, Prediction]],
    beside: Mapping[str, Prediction],
) -> str:
    """Push and pull by the number of servers, beside all-reduces."""
    lines = [
        f"{'servers':<9}{'workers':<9}{'push':>11}{'pull':>11}{'both':>11}{'server sends':>14}  held up by"
    ]
    for count, (push, pull) in found.items():
        everybody = count == world.size
        workers = world.size if everybody else world.size - count
        lines.append(
            f"{'all' if everybody else count:<9}{workers:<9}{seconds(push.seconds):>11}"
            f"{seconds(pull.seconds):>11}{seconds(push.seconds + pull.seconds):>11}"
            f"{_bytes(pull.traffic.sent[0]):>14}  {push.bottleneck}"
        )
    (best, first), *_ = beside.items()
    fastest = min(found.values(), key=lambda ways: ways[0].seconds + ways[1].seconds)
    ratio = (fastest[0].seconds + fastest[1].seconds) / first.seconds if first.seconds else 1.0
    lines.append(f"the fastest of them takes {ratio:.2f} x the time of comm={best}, with no overlap")
    return "\n".join(lines)


def steps(num_processes: int, found: Mapping[str, PredictedStep]) -> str:
    """Efficiency is the fraction of a step that is computing, at its speed without communication."""
    lines = [
        f"{'algorithm':<18}{'step':>11}{'computing':>11}{'overlapped':>11}{'exposed':>11}{'efficiency':>12}"
    ]
    for algorithm, step in found.items():
        lines.append(
            f"{algorithm:<18}{seconds(step.seconds):>11}{seconds(step.computed_s + step.slowed_s):>11}"
            f"{seconds(step.overlapped_s):>11}{seconds(step.exposed_s):>11}"
            f"{step.computed_s / step.seconds:>11.1%} "
        )
    best, first = next(iter(found.items()))
    times = num_processes * first.computed_s / first.seconds
    words = f"{times:,.{0 if times >= 10 else 2}f} x the speed of one process, of {num_processes:,}"
    return "\n".join([*lines, "", f"best: comm={best}, {words}" if len(found) > 1 else words])


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
