"""The cost model: traffic as in textbooks, times that follow from the links, and errors for wrong input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner import comm as plan
from planner import cost_model as predicting
from planner import formulas, rounds, step
from planner.cost_model import Machine, Prediction, measured, predict
from planner.entries import Fields
from planner.push_pull import exchange
from planner.traffic import count_traffic
from planner.world import PlannedWorld
from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.algorithms.rank_order import Hosts

_N = 64 << 20  # bytes: divides by every world size here
_NETWORK = Machine(latency_s=20e-6, link_bytes_per_s=1e9, local_latency_s=5e-6, local_bytes_per_s=50e9)

_LOCAL = ["--local-gbit", "400", "--local-latency-us", "2"]


def _on(hosts: int, per_host: int) -> list[str]:
    return ["--hosts", str(hosts), "--per-host", str(per_host)]


def _predict(
    algorithm: str, hosts: list[int], machine: Machine = _NETWORK, num_bytes: int = _N, **options: Any
) -> Prediction:
    schedules = [build(algorithm, rank, hosts) for rank in range(len(hosts))]
    return predict(schedules, hosts, machine, num_bytes, **options)


@pytest.mark.parametrize("world", [2, 64])
def test_short_messages_take_the_number_of_rounds_of_the_formulas(world: int) -> None:
    hosts = list(range(world))
    rounds = {
        "ring": 2 * (world - 1),
        "master_worker": 2,
        "halving_doubling": 2 * math.log2(world),
        "tree": 2 * math.floor(math.log2(world)),
        "hierarchical": 2 * (world - 1),
    }
    for algorithm, count in rounds.items():
        seconds = _predict(algorithm, hosts, Machine(latency_s=20e-6), num_bytes=4 * world).seconds
        assert seconds == pytest.approx(count * 20e-6), algorithm


def test_long_buckets_take_the_time_of_the_busiest_link() -> None:
    hosts = [0, 0, 0, 0, 1, 1, 1, 1]
    by_link = {"ring": 2 * 7 / 8, "hierarchical": 1, "halving_doubling": 1, "tree": 1, "master_worker": 4}
    for algorithm, crossings in by_link.items():
        prediction = _predict(algorithm, hosts)
        assert prediction.bottleneck == "link between hosts", algorithm
        assert prediction.seconds == pytest.approx(crossings * _N / 1e9, rel=0.05), algorithm


@pytest.mark.parametrize(
    ("machine", "bottleneck"),
    [
        (Machine(local_copy_s_per_byte=1e-9), "one process"),
        (Machine(local_copy_s_per_byte=1e-9, parallelism=1.0), "processors of a host"),
        (Machine(local_bytes_per_s=1e9), "link within a host"),
        (Machine(local_latency_s=1.0), "latency"),
        (Machine(message_s=1e-3), "one process"),
    ],
)
def test_the_bottleneck_is_named(machine: Machine, bottleneck: str) -> None:
    assert _predict("hierarchical", [0, 0, 0, 0], machine).bottleneck == bottleneck


_BUSY = replace(_NETWORK, add_s_per_byte=1e-10, network_s_per_byte=3e-10, message_s=1e-6, parallelism=3.0)
_LAYOUTS = [
    (6, 4, 1, 1.0),
    (8, 2, 2, 3.0),
    (5, 3, 1, 4.0),
    (8, 2, 3, 3.0),  # a last switch with two hosts
    (7, 2, 2, 2.0),
]  # hosts, ranks, hosts of a switch, oversubscription


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_shortcut_equals_simulating_all_ranks_and_rounds(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repetitions over ranks or rounds are skipped; here also at small sizes."""

    def found() -> list[Prediction]:
        predictions = []
        for num_hosts, per_host, together, factor in _LAYOUTS:
            hosts = [rank // per_host for rank in range(num_hosts * per_host)]
            machine = replace(_BUSY, rails=2, hosts_per_switch=together, oversubscription=factor)
            schedules = [build(algorithm, rank, hosts) for rank in range(len(hosts))]
            predictions.append(predict(schedules, hosts, machine, _N))
        return predictions

    short = found()
    monkeypatch.setattr(rounds, "_repeats", lambda places, block: False)
    monkeypatch.setattr(predicting, "_EQUAL", -1.0)
    for one, other, case in zip(short, found(), _LAYOUTS, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=1e-9), case
        assert one.bottleneck == other.bottleneck, case
        assert one.processors_s == pytest.approx(other.processors_s)
        for name in ("sent", "received", "host_sent", "host_received"):
            assert getattr(one.traffic, name) == pytest.approx(getattr(other.traffic, name)), case


@pytest.mark.slow
def test_16384_ranks_are_not_simulated_pair_by_pair() -> None:
    """The schedules of only a few ranks are built, unless all ranks differ."""
    hosts = Hosts(rank // 8 for rank in range(16_384))
    for name in ("ring", "halving_doubling", "hierarchical"):
        family = rounds.Family(partial(build, name, hosts=hosts), len(hosts))
        assert rounds.rounds(family, hosts, 1)[0] == 8
        assert len(family.built) < 300, name


def test_the_table_ends_with_the_best_choice(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*_on(2, 4), "--gbit", "1", "--latency-us", "50", *_LOCAL]
    assert plan.main(command) == 0
    rows = capsys.readouterr().out.splitlines()
    header = next(i for i, row in enumerate(rows) if row.startswith("algorithm"))
    order = [row.split()[0] for row in rows[header + 1 : header + 6]]
    assert set(order) == set(ALGORITHMS)
    assert order[-1] == "master_worker"
    assert f"best: comm={order[0]}" in rows[-1]
    plan.main([*command, "--wire-dtype", "bf16"])
    assert (
        f"{25e6 * 8 * 3.5 / 4 / 2 / 1e6:.1f} MB" in capsys.readouterr().out
    )  # 2 N (P-1) in all, half the bytes


def _results(**changes: Any) -> dict[str, Any]:
    def link(source: int, target: int, latency_us: float, gbit_s: float) -> dict[str, float]:
        of = {"source": source, "target": target, "latency_us": latency_us, "gbit_s": gbit_s}
        return of | {"message_us": 10, "processor_s_per_byte": 3e-10}

    return {
        "passed": True,
        "device": "cpu",
        "links": [link(0, 0, 5, 20), link(0, 1, 40, 1), link(1, 0, 60, 1)],
        "costs": {"copy_s_per_byte": 1e-10, "add_s_per_byte": 2e-10, "parallelism": 2.0},
        **changes,
    }


def test_a_preflight_result_becomes_a_machine() -> None:
    on_cpu = Machine(**measured(Fields("results", _results())))
    assert on_cpu.latency_s == pytest.approx(50e-6)
    assert on_cpu.link_bytes_per_s == pytest.approx(125e6)
    assert on_cpu.local_bytes_per_s == math.inf  # shared memory, at the price of copies
    assert on_cpu.local_copy_s_per_byte == 1e-10
    assert (on_cpu.message_s, on_cpu.network_s_per_byte) == pytest.approx((1e-5, 3e-10))
    on_gpu = Machine(**measured(Fields("results", _results(device="cuda"))))
    assert on_gpu.local_bytes_per_s == pytest.approx(2.5e9)
    assert on_gpu.local_copy_s_per_byte == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--hosts 2", "--gbit, --latency-us missing"),
        ("--hosts 2 --from nowhere.json", "nowhere.json"),
        ("--hosts 70000 --gbit 1 --latency-us 1", "70,000 processes, but at most 65,536"),
        ("--hosts 2 --train . --servers 1 --megabytes 25", "--train does not support --megabytes, --servers"),
    ],
)
def test_mistakes_are_reported(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        plan.main(command.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("servers", [1, 4])
def test_servers_share_the_load(servers: int) -> None:
    hosts = list(range(servers + 4))
    push, pull = (
        predict(way, hosts, _NETWORK, _N) for way in exchange(range(servers), range(servers, len(hosts)))
    )
    assert push.traffic.received[:servers] == [4 * _N // servers] * servers
    assert pull.traffic.sent[:servers] == [(servers + 3) * _N // servers] * servers, "to each other, too"
    assert push.traffic.sent[servers:] == pull.traffic.received[servers:] == [_N] * 4
    assert push.seconds == pytest.approx(4 * _N / servers / 1e9, rel=0.05)


def test_formulas_equal_the_traffic_of_the_schedules() -> None:
    hosts = range(8)
    for name, classic in formulas.CLASSIC.items():
        traffic = count_traffic([build(name, rank, hosts) for rank in hosts], hosts, _N // 4, 4)
        if classic.counted is not None:
            assert classic.counted(traffic) == classic.value(8) * _N, name


def test_formulas_and_servers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--formulas", *_on(8, 1), "--servers", "2"]) == 0
    table = capsys.readouterr().out
    assert "(P-1)N" in table and "2 servers" in table and "N log2 P" in table
    assert plan.main([*_on(4, 1), "--gbit", "1", "--latency-us", "50", "--servers", "1,2,all"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows if row and row[0] in ("1", "2", "all")] == [
        ["1", "3"],
        ["2", "2"],
        ["all", "4"],
    ]
    with pytest.raises(SystemExit):
        plan.main([*_on(4, 1), "--gbit", "1", "--latency-us", "50", "--servers", "4"])
    assert "must be all, or from 1 to 3" in capsys.readouterr().err


def _run_in(folder: Path, **changes: Any) -> Path:
    """Write a run with buckets of 1, 2, 1 MB; at 1 GB/s for adds and copies, a ring of 2 moves 1 MB in 1 ms."""
    buckets = [(1_000_000, 10.0), (2_000_000, 2.0), (1_000_000, 0.0)]
    timeline = {
        "device": "cuda",
        "hosts": [0, 0],
        "wire_dtype": "fp32",
        "exposed_ms": 5.0,
        "buckets": [{"bytes": size, "early_ms": early} for size, early in buckets],
    }
    result = {"comm": "native", "ms_per_step": 30.0, "timeline": timeline, **changes}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_step_is_compute_plus_exposed_communication(tmp_path: Path) -> None:
    run = step.read(_run_in(tmp_path))
    slow = PlannedWorld(2, 1, Machine(link_bytes_per_s=1e9), segment_bytes=1000)
    assert run.computed_s(None) == pytest.approx(0.025)
    # The first has gone 9 ms before the end, and the second at the end; the third is yet to go.
    found = run.step(slow, "ring", 0.025)
    assert (found.overlapped_s, found.exposed_s) == pytest.approx((0.003, 0.001), rel=0.02)
    assert found.seconds == pytest.approx(0.026, rel=1e-3)
    tenth = run.step(replace(slow, machine=Machine(link_bytes_per_s=1e8)), "ring", 0.025)
    assert tenth.exposed_s == pytest.approx(
        0.030, rel=0.02
    )  # 40 ms without a pause, 10 of them before the end
    # Links on which 1 ms should have been exposed: of the 5 measured, 4 were waiting for others.
    assert run.computed_s(Machine(local_bytes_per_s=1e9)) == pytest.approx(0.029, rel=0.01)


def test_a_plan_uses_the_measurements_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*_on(64, 8), "--gbit", "100", "--latency-us", "10", *_LOCAL, "--train", str(_run_in(tmp_path))]
    assert plan.main(options) == 0
    out = capsys.readouterr().out
    assert "comm=ring: step time 30.00 ms (25.00 ms computing), 3 buckets, 4 MB" in out
    assert all(name in out for name in ALGORITHMS) and "512 processes are" in out
    known = json.loads((_run_in(tmp_path) / "result.json").read_text())["timeline"]
    for changes, message in (
        ({"timeline": None}, "has no timeline"),
        ({"timeline": known | {"hosts": []}}, "timeline.hosts is []"),
        ({"ms_per_step": 4}, "a step took 4 ms, but its communication alone would take 5 ms"),
        ({"comm": "hook"}, "comm=hook: expected one of ring"),
    ):
        with pytest.raises(SystemExit):
            plan.main([*options[:-1], str(_run_in(tmp_path, **changes))])
        assert message in capsys.readouterr().err
