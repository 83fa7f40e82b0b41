"""Pull and push: which rows go where; ranks with another layout are refused."""

from typing import cast

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.layout import bytes_by_server, lay_out, unpack
from trainer.comm.parameter_server.links import Loopback, PeerLink
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
