"""Pull and push: which rows go where; ranks with another layout are refused; the order is recorded and repeated."""

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trainer.comm.parameter_server import async_rounds, replay_file
from trainer.comm.parameter_server.async_rounds import AsyncServer
from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.layout import bytes_by_server, lay_out, unpack
from trainer.comm.parameter_server.links import Loopback, PeerLink
from trainer.comm.parameter_server.order import Order, OutOfOrderError
from trainer.comm.parameter_server.server import LayoutError, Server
from trainer.comm.transport.blame import PeerError


def shapes() -> dict[str, torch.nn.Parameter]:
    return {
        "a": torch.nn.Parameter(torch.arange(35.0).view(7, 5)),
        "b": torch.nn.Parameter(torch.arange(2.0)),
        "c": torch.nn.Parameter(torch.arange(12.0).view(4, 3), requires_grad=False),
    }


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_all_rows_come_from_somewhere_once(servers: int) -> None:
    parameters = shapes()
    buckets = lay_out(parameters, servers, bucket_bytes=1 << 20)
    assert [bucket.names for bucket in buckets] == [("a", "b"), ("c",)]  # frozen ones apart
    assert sum(bytes_by_server(buckets)) == sum(p.nbytes for p in parameters.values())
    pulled = {name: torch.full_like(value, torch.nan) for name, value in parameters.items()}
    for bucket in buckets:
        for server in range(servers):
            rows = [parameters[p.name][p.begin : p.end].reshape(-1) for p in bucket.row_ranges[server]]
            unpack(bucket, server, torch.cat(rows).detach(), pulled)
    assert all(torch.equal(pulled[name], value) for name, value in parameters.items())


def test_a_parameter_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="scale cannot be split into rows"):
        lay_out({"scale": torch.tensor(1.0)}, 2, 1024)


def greet(bucket_bytes: list[int]) -> str:
    rank = dist.get_rank()
    link = PeerLink(cast(dist.ProcessGroup, dist.new_group(backend="gloo")), 1 - rank, 10.0)
    parameters = shapes()
    buckets = lay_out(parameters, 1, bucket_bytes[rank])
    if rank == 1:
        Client([link], buckets, parameters).greet()
        return ""
    server = Server(0, {1: link}, buckets, [torch.zeros(b.numels[0]) for b in buckets])
    server.start(server.welcome)
    try:
        server.finish()
    except LayoutError as error:
        return str(error)
    return ""


def test_ranks_that_would_cut_otherwise_are_refused() -> None:
    assert run_ranks(greet, 2, [1024, 1024])[0] == ""
    assert "rank 1 would send other parameters" in run_ranks(greet, 2, [1024, 16])[0]


def test_what_a_worker_pulls_is_copied_to_where_its_last_push_was() -> None:
    buckets = lay_out(shapes(), 1, bucket_bytes=1 << 20)
    values = [torch.ones(bucket.numels[0]) for bucket in buckets]
    server = Server(0, {1: Loopback(0, 1.0), 2: Loopback(0, 1.0)}, buckets, values)
    first = server.copy_for(1)
    values[0].fill_(2.0)
    second = server.copy_for(2)
    assert first[0].unique().tolist() == [1] and second[0].unique().tolist() == [2]
    assert all(first[index] is pushed for index, pushed in server.pushed[1].items()), "no more memory"


class _Shares:
    """A link whose worker asks for one share of a step after the other, and whether it may pull."""

    def __init__(self, shares: int) -> None:
        kinds = (async_rounds._MAY_PULL, async_rounds._PULL, async_rounds._PUSH)
        self._requests = iter([*kinds * shares, async_rounds._END])

    def receive(self, request: torch.Tensor, tag: int) -> Any:
        request.copy_(torch.tensor([next(self._requests), 0]))
        return SimpleNamespace(wait=lambda: None)

    def send(self, answer: torch.Tensor, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("max_staleness", [1, 2, math.inf])
def test_a_worker_waits_to_pull_while_it_is_too_far_ahead(max_staleness: float) -> None:
    pushes = list[Any]()
    server: Any = SimpleNamespace(
        links={1: _Shares(5), 2: _Shares(0)}, pushed={1: {}}, start=lambda serve: None
    )
    server.copy_for = lambda worker: {}
    server.send = lambda worker, values: None
    server.receive = lambda worker, facts: torch.ones(1)
    rounds = AsyncServer(server, Order(0.1), max_staleness, lambda *push: pushes.append(push))
    rounds.start(5, None, lambda: False)
    if math.isinf(max_staleness):
        rounds._serve(1)
        assert len(pushes) == 5
    else:
        with pytest.raises(PeerError, match="rank 2"):
            rounds._serve(1)
        assert len(pushes) == max_staleness + 1, "it pulled while it was no more than that ahead"


def test_messages_to_oneself_move_in_whatever_order_they_are_waited_for() -> None:
    link = Loopback(0, timeout_s=0.2)
    got = torch.zeros(2), torch.zeros(2)
    early = link.receive(got[0], tag=1)
    sent = [link.send(torch.full((2,), float(tag)), tag) for tag in (2, 1)]
    late = link.receive(got[1], tag=2)
    for transfer in (late, early, *sent):
        transfer.wait()
    assert [value.tolist() for value in got] == [[1, 1], [2, 2]]
    with pytest.raises(PeerError, match="to send a message"):
        link.receive(got[0], tag=3).wait()


def test_an_order_is_noted_and_repeated() -> None:
    order = Order(timeout_s=5.0)
    order.start(["push 2", "pull 1"])
    done: list[str] = []

    def event(what: str, worker: int) -> None:
        with order.turn(what, worker):
            done.append(f"{what} {worker}")

    first = threading.Thread(target=event, args=("pull", 1))
    first.start()
    event("push", 2)
    first.join()
    assert done == order.events == ["push 2", "pull 1"]
    order = Order(timeout_s=0.05)
    order.start(["push 2"])
    with pytest.raises(OutOfOrderError, match="'push 2' must come first"), order.turn("pull", 1):
        pass
    with pytest.raises(PeerError, match=r"rank 3 did not answer .* due to push"):
        order.wait_until(lambda: False, slowest=lambda: 3)


def test_arrivals_of_other_roles_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "arrivals"
    replay_file.append(file, {"servers": [0]}, 0, 5, [["pull 1"]])
    replay_file.append(file, {"servers": [0]}, 0, 5, [])
    with pytest.raises(ValueError, match="line 2 is not a round of 1 servers"):
        replay_file.read(file, {"servers": [0]})
    file.unlink()
    replay_file.append(file, {"servers": [0]}, 0, 4, [["pull 2"]])  # again, after a restart
    assert replay_file.read(file, {"servers": [0]}) == {0: (4, [["pull 2"]])}
    with pytest.raises(ValueError, match=r"of a run with servers \[0\], but this run has \[0, 1\]"):
        replay_file.read(file, {"servers": [0, 1]})
    for line in ("{}", "7", "[" * 9000, _round(first_step=[]), _round(events=[7]), _round(events=[[7]])):
        file.write_text(f"{line}\n")
        with pytest.raises(ValueError, match="line 1 is not a round"):
            replay_file.read(file, {"servers": [0]})
    file.write_text(_round(roles={"servers": ["\x1b[2J"]}) + "\n")
    with pytest.raises(ValueError, match=r"of a run with servers \['\\x1b\[2J'\]"):
        replay_file.read(file, {"servers": [0]})


def _round(**changed: Any) -> str:
    return json.dumps({"roles": {"servers": [0]}, "first_step": 0, "steps": 1, "events": [[]]} | changed)


def test_a_line_torn_by_a_kill_is_passed_over_and_written_again(tmp_path: Path) -> None:
    file, roles = tmp_path / "arrivals", {"servers": [0]}
    replay_file.append(file, roles, 0, 5, [["pull 1"]])
    one = file.read_bytes()
    replay_file.append(file, roles, 5, 5, [["pull 2", "push 2"]])
    both = file.read_bytes()
    for length in range(len(both)):
        file.write_bytes(both[:length])
        whole = {0: (5, [["pull 1"]])} if length >= len(one) else {}
        assert replay_file.read(file, roles) == whole, length
        replay_file.append(file, roles, 5, 5, [["pull 2", "push 2"]])
        assert replay_file.read(file, roles) == {**whole, 5: (5, [["pull 2", "push 2"]])}, length
