"""Predict the time of a collective from its schedules and the capacities of links and processors.

The model is LogGP with three kinds of links and one additional resource. A bucket is sent in segments that
overlap. Its time is the time that the first segment takes for all rounds plus, for each further segment, the
time of the busiest resource: a host's link in either direction, the trunk of its switch, a process's thread,
or the processors that the processes of a host share.

Source: A. Alexandrov et al., "LogGP: incorporating long messages into the LogP model", SPAA 1995.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.entries import Fields, number
from planner.rounds import Round, rounds
from planner.traffic import Traffic
from trainer.comm.algorithms.pipeline import SEGMENT_MB, WIDTH, first_sweep
from trainer.comm.algorithms.schedule import Schedule

_EQUAL = 1e-9  # relative difference below which times are equal


@dataclass(frozen=True)
class Machine:
    """Capacities of the hosts, which are all equal, and of the network. CPU times are for one processor."""

    latency_s: float = 0.0  # one-way latency of a message between hosts
    link_bytes_per_s: float = math.inf  # bandwidth of each link of a host, in each direction
    rails: int = 1  # links of each host, among which its processes are divided
    hosts_per_switch: int = 1 << 62  # hosts on each switch, numbered consecutively (default: all)
    oversubscription: float = 1.0  # bandwidth of a switch's links to hosts / bandwidth of its trunk
    local_latency_s: float = 0.0
    local_bytes_per_s: float = math.inf  # bandwidth of a process to others on its host, in each direction
    local_copy_s_per_byte: float = 0.0  # CPU time of the sender and of the receiver, within a host
    add_s_per_byte: float = 0.0
    network_s_per_byte: float = 0.0  # CPU time to send or receive between hosts
    message_s: float = 0.0  # CPU time of the sender and of the receiver
    parallelism: float = math.inf  # processors of a host


def measured(results: Fields) -> dict[str, Any]:
    """Return fields of a `Machine`, as medians over all links, from the output of the preflight's `--json`.

    The fields for links between hosts are missing if there is one host, and those for links within hosts if
    there is one process per host.

    Raises:
        ValueError: the preflight failed, or `results` are not its output.
    """
    if results.values.get("passed") is not True:
        raise ValueError("expected the output of a preflight that passed")
    costs, on_cpu = results.mapping("costs"), results.take("device", str) == "cpu"
    fields = {
        "add_s_per_byte": number(costs, "add_s_per_byte"),
        "parallelism": number(costs, "parallelism", positive=True),
    }
    rows: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for link in results.mappings("links"):
        row = (
            number(link, "latency_us") * 1e-6,
            number(link, "gbit_s", positive=True) / 8e-9,
            number(link, "message_us") * 1e-6,
            number(link, "processor_s_per_byte"),
        )
        rows[link.take("source", int) == link.take("target", int)].append(row)
    if rows[True]:
        fields["local_latency_s"], local, fields["message_s"], _ = np.median(rows[True], axis=0).tolist()
        # On CPUs, processes of a host copy in shared memory; on GPUs, NCCL moves data over a link.
        if not on_cpu:
            fields["local_bytes_per_s"] = local
    if on_cpu:
        fields["local_copy_s_per_byte"] = number(costs, "copy_s_per_byte")
    if rows[False]:
        names = ("latency_s", "link_bytes_per_s", "message_s", "network_s_per_byte")
        fields |= zip(names, np.median(rows[False], axis=0).tolist(), strict=True)
    return fields


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a collective."""

    seconds: float
    bottleneck: str  # the resource that limits the throughput of segments; "latency" if none does
    traffic: Traffic  # assuming that all parts are equally long
    processors_s: float = 0.0  # busy time of a host's processors


def predict(
    schedules: Sequence[Schedule],
    hosts: Sequence[int],
    machine: Machine,
    num_bytes: int,
    itemsize: int = 4,
    segment_bytes: int = int(SEGMENT_MB * 2**20),
    width: int = WIDTH,
) -> Prediction:
    """Predict the time of one collective that starts at the same moment on all ranks.

    Args:
        schedules: one schedule per rank; a `Family` builds only those that are needed.
        hosts: index of the host of every rank, without gaps.
        num_bytes: size of the bucket on the wire; if each rank has its own block, the total of all blocks.
        itemsize: bytes of an element on the wire.
        segment_bytes, width: see `trainer.comm.algorithms.pipeline`.
    """
    return Predictor(schedules, hosts, machine)(num_bytes, itemsize, segment_bytes, width)


class Predictor:
    """Predicts like `predict`, but for buckets of several sizes, which share part of the computation."""

    def __init__(self, schedules: Sequence[Schedule], hosts: Sequence[int], machine: Machine) -> None:
        self._hosts, self._machine, self._num_rounds = np.asarray(hosts), machine, schedules[0].num_rounds
        together = 1 if machine.oversubscription == 1 else machine.hosts_per_switch
        self._block, self._rounds = rounds(schedules, hosts, together)

    def __call__(
        self,
        num_bytes: int,
        itemsize: int = 4,
        segment_bytes: int = int(SEGMENT_MB * 2**20),
        width: int = WIDTH,
    ) -> Prediction:
        num_segments = max(1, -(-num_bytes // segment_bytes))
        segment = num_bytes / num_segments
        tally = _Loads(self._hosts, self._block, self._machine, segment, itemsize)
        for round_ in self._rounds:
            tally.play(round_)
        loads = tally.loads()
        # The number of rounds of the first segment after which the last segment starts.
        delay = max((num_segments - 1) / width, first_sweep(num_segments - 1, self._num_rounds, width))
        loads["latency"] = tally.slowest_round_s * delay / max(1, num_segments - 1)
        bottleneck = max(loads, key=loads.__getitem__)
        return Prediction(
            seconds=float(tally.clocks.max() + (num_segments - 1) * loads[bottleneck]),
            bottleneck=bottleneck if num_segments > 1 else "latency",
            traffic=tally.traffic(num_segments, copies=len(self._hosts) // self._block),
            processors_s=float(num_segments * loads["processors of a host"]),
        )


class _Loads:
    """A simulation of one segment: the clock of each rank of a block, and the load of each resource."""

    def __init__(
        self, hosts: np.ndarray, block: int, machine: Machine, segment: float, itemsize: int
    ) -> None:
        self._host_of, self._machine, self._segment, self._itemsize = hosts, machine, segment, itemsize
        self._switch_of = hosts // machine.hosts_per_switch
        self._hosts, self._switches = hosts[:block], self._switch_of[:block]
        self._num_hosts = int(self._hosts.max()) + 1
        self._rails = _rails(self._hosts, machine.rails)
        self._trunk_bytes_per_s = (
            min(machine.hosts_per_switch, int(hosts.max()) + 1)
            * machine.rails * machine.link_bytes_per_s / machine.oversubscription
        )  # fmt: skip
        self.clocks = np.zeros(block)
        self.slowest_round_s = 0.0
        self._work_s = np.zeros(block)  # busy time of each rank's thread
        # Bytes that each rank sends and receives inside its host, between hosts, and between switches.
        self._local, self._across, self._beyond = np.zeros((3, 2, block))
        self._links = np.zeros((2, int(self._rails.max()) + 1))  # bytes over each link

    def loads(self) -> dict[str, float]:
        """Return the seconds for which one segment keeps the busiest resource of each kind busy."""
        machine, hosts = self._machine, self._hosts
        by_host = np.bincount(hosts, self._work_s + self._across.sum(0) * machine.network_s_per_byte)
        return {
            "link between hosts": self._links.max() / machine.link_bytes_per_s,
            "trunk of a switch": _sums(self._switches, self._beyond).max() / self._trunk_bytes_per_s,
            "link within a host": self._local.max() / machine.local_bytes_per_s,
            "one process": self._work_s.max(),
            "processors of a host": by_host.max() / machine.parallelism,
        }

    def traffic(self, num_segments: int, copies: int) -> Traffic:
        """Return the traffic of the bucket on all ranks, `copies` times that of the simulated block."""

        def listed(values: np.ndarray) -> list[int]:
            return np.rint(values * num_segments).astype(int).tolist() * copies

        return Traffic(*map(listed, (*(self._local + self._across), *_sums(self._hosts, self._across))))

    def play(self, round_: Round) -> None:
        """Advance all clocks by `round_.repeat` repetitions of `round_`."""
        machine, hosts, block = self._machine, self._hosts, len(self._hosts)
        num_bytes = round_.share * self._segment
        # A message out of the block represents one into it.
        source, target = round_.source, round_.target % block
        local = self._host_of[round_.source] == self._host_of[round_.target]
        beyond = self._switch_of[round_.source] != self._switch_of[round_.target]
        # A chunk of less than one element is sent only in some segments.
        message_s = machine.message_s * np.minimum(1.0, num_bytes / self._itemsize)
        copy_s = np.where(local, num_bytes * machine.local_copy_s_per_byte, 0.0)
        send_s = message_s + np.where(round_.fresh, copy_s, 0.0)
        receive_s = message_s + np.where(round_.adds, num_bytes * machine.add_s_per_byte, copy_s)
        work_s = np.bincount(source, send_s, block) + np.bincount(target, receive_s, block)

        def both_ends(moved: np.ndarray) -> np.ndarray:
            """Return the bytes that each rank sends and receives."""
            weights = np.where(moved, num_bytes, 0.0)
            return np.stack([np.bincount(end, weights, block) for end in (source, target)])

        def transfer_s(latency_s: float, load: np.ndarray, of: np.ndarray, bytes_per_s: float) -> np.ndarray:
            """Return the seconds that the message of each rank takes on its resource, `of[rank]`."""
            return latency_s + np.maximum(load[0][of[source]], load[1][of[target]]) / bytes_per_s

        inside, across, past = both_ends(local), both_ends(~local), both_ends(beyond)
        each = np.arange(block)
        on_links = _sums(self._rails, across)
        links = transfer_s(machine.latency_s, on_links, self._rails, machine.link_bytes_per_s)
        trunks = transfer_s(
            machine.latency_s, _sums(self._switches, past), self._switches, self._trunk_bytes_per_s
        )
        within = transfer_s(machine.local_latency_s, inside, each, machine.local_bytes_per_s)
        on_the_way = np.where(local, within, np.where(beyond, np.maximum(links, trunks), links))
        self._work_s += round_.repeat * work_s
        self._local += round_.repeat * inside
        self._across += round_.repeat * across
        self._links += round_.repeat * on_links
        self._beyond += round_.repeat * past

        # If there are more busy processes than processors, each is slowed down.
        busy = np.bincount(hosts[work_s > 0], minlength=self._num_hosts)
        slowdown = np.maximum(1.0, busy / machine.parallelism)
        send_s *= slowdown[hosts[source]]
        receive_s *= slowdown[hosts[target]]
        sends = [(source[t], send_s[t], on_the_way[t], t) for t in _turns(round_.send_turn)]
        receipts = [(target[t], receive_s[t], t) for t in _turns(round_.receive_turn)]
        arrival = np.empty(len(source))

        def play_once(clocks: np.ndarray) -> None:
            for rank, duration, transfer, messages in sends:
                sent = clocks[rank] + duration
                clocks[rank] = sent
                arrival[messages] = sent + transfer
            for rank, duration, messages in receipts:
                clocks[rank] = np.maximum(clocks[rank], arrival[messages]) + duration

        self._repeat(play_once, round_.repeat)

    def _repeat(self, play_once: Callable[[np.ndarray], None], repeat: int) -> None:
        """Play a round `repeat` times.

        The time that a round adds to each clock does not depend on a common offset. So if all clocks have
        advanced by the same amount since an earlier round, the rounds in between repeat, and can be skipped.
        This happens eventually in every system that only adds and takes maxima. As in Brent's cycle
        detection, each round is compared with the last round whose number is a power of two.
        """
        clocks, earlier, earlier_at, done = self.clocks, self.clocks.copy(), 0, 0
        while done < repeat:
            before = clocks.max()
            play_once(clocks)
            done += 1
            self.slowest_round_s = max(self.slowest_round_s, clocks.max() - before)
            advance = clocks - earlier
            if advance.max() - advance.min() <= _EQUAL * advance.max():
                cycles = (repeat - done) // (done - earlier_at)
                clocks += cycles * advance.max()
                done += cycles * (done - earlier_at)
            elif done & (done - 1) == 0:
                earlier, earlier_at = clocks.copy(), done


def _rails(hosts: np.ndarray, rails: int) -> np.ndarray:
    sizes, order = np.bincount(hosts), np.argsort(hosts, kind="stable")
    position = np.empty(len(hosts), np.intp)
    position[order] = np.arange(len(hosts)) - (np.cumsum(sizes) - sizes)[hosts[order]]
    return hosts * rails + position * rails // sizes[hosts]


def _sums(of: np.ndarray, by_rank: np.ndarray) -> np.ndarray:
    """Return the sums (2, resources) of values (2, ranks), where rank `r` uses resource `of[r]`."""
    return np.stack([np.bincount(of, row) for row in by_rank])


def _turns(turn: np.ndarray) -> list[np.ndarray]:
    """Return, for each turn, the indices of its messages; no rank occurs twice in a turn."""
    order = np.argsort(turn, kind="stable")
    return np.split(order, np.cumsum(np.bincount(turn))[:-1]) if len(turn) else []
