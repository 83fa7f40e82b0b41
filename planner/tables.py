"""Tables of predictions."""

from collections.abc import Mapping

from planner.cost_model import Prediction
from planner.step import PredictedStep
from planner.world import PlannedWorld


def heading(world: PlannedWorld, origin: str) -> str:
    """Return a description of the hosts and links; `origin` says where the numbers come from."""
    machine = world.machine
    rate, latency = machine.link_bytes_per_s * 8e-9, machine.latency_s * 1e6
    lines = [f"{world.num_hosts} hosts x {world.per_host} processes"]
    if world.num_hosts == 1:
        return f"{lines[0]}, no links between hosts"
    lines.append(f"between hosts {rate:.3g} Gbit/s and {latency:.3g} us, {origin}")
    if machine.rails > 1:
        lines.append(f"{machine.rails} such links per host, shared by its processes")
    if machine.oversubscription != 1:
        lines.append(
            f"{machine.hosts_per_switch} hosts per switch, whose trunk has 1/{machine.oversubscription:g} "
            "of the bandwidth of their links"
        )
    return "\n".join(lines)


def all_reduces(what: str, predictions: Mapping[str, Prediction]) -> str:
    """Return a table of times and traffic: the largest per rank, the largest per host, and the total."""
    lines = [
        f"all-reduce of {what}",
        f"{'algorithm':<18}{'time':>11}{'sent by rank':>15}{'by host':>12}{'total':>12}  bottleneck",
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
    predictions: Mapping[int, tuple[Prediction, Prediction]],
    all_reduces: Mapping[str, Prediction],
) -> str:
    """Return a table of push and pull times by number of servers, compared with the fastest all-reduce."""
    lines = [
        f"{'servers':<9}{'workers':<9}{'push':>11}{'pull':>11}{'both':>11}{'server sends':>14}  bottleneck"
    ]
    for count, (push, pull) in predictions.items():
        is_all = count == world.size
        workers = world.size if is_all else world.size - count
        lines.append(
            f"{'all' if is_all else count:<9}{workers:<9}{seconds(push.seconds):>11}"
            f"{seconds(pull.seconds):>11}{seconds(push.seconds + pull.seconds):>11}"
            f"{_bytes(pull.traffic.sent[0]):>14}  {push.bottleneck}"
        )
    (best, first), *_ = all_reduces.items()
    fastest = min(predictions.values(), key=lambda pair: pair[0].seconds + pair[1].seconds)
    ratio = (fastest[0].seconds + fastest[1].seconds) / first.seconds if first.seconds else 1.0
    lines.append(f"the fastest takes {ratio:.2f} x the time of comm={best}, without overlap")
    return "\n".join(lines)


def steps(num_processes: int, predictions: Mapping[str, PredictedStep]) -> str:
    """Return a table of step times and efficiencies (computing time divided by step time)."""
    lines = [
        f"{'algorithm':<18}{'step':>11}{'computing':>11}{'overlapped':>11}{'exposed':>11}{'efficiency':>12}"
    ]
    for algorithm, step in predictions.items():
        lines.append(
            f"{algorithm:<18}{seconds(step.seconds):>11}{seconds(step.computed_s + step.slowed_s):>11}"
            f"{seconds(step.overlapped_s):>11}{seconds(step.exposed_s):>11}"
            f"{step.computed_s / step.seconds:>11.1%} "
        )
    best, first = next(iter(predictions.items()))
    speedup = num_processes * first.computed_s / first.seconds
    times = f"{speedup:,.{0 if speedup >= 10 else 2}f} times"
    summary = f"{num_processes:,} processes are {times} as fast as one process"
    return "\n".join([*lines, "", f"best: comm={best}, {summary}" if len(predictions) > 1 else summary])


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
