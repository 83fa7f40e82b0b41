"""What a run would take of memory, counted on tensors that have none."""

import json
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.runs import settings
from trainer.memory.__main__ import main
from trainer.memory.fit import MOST, largest_micro_size
from trainer.memory.ledger import Ledger
from trainer.memory.rehearse import Footprint, FusedAttention, Rehearsal, World

MLP = ("data=digits", "model=mlp", "model.hidden=[128,128,128,128]", "optim.lr=0.1")
NUM_PARAMETERS = 64 * 128 + 3 * 128**2 + 128 * 10 + 4 * 128 + 10
KB = 1024


def test_a_tensor_counts_until_nobody_holds_it_and_as_long_as_its_memory_is_not_given_back() -> None:
    with FakeTensorMode(), Ledger() as ledger:
        first = torch.empty(KB)
        second = first.view(32, 32) * 2
        ledger.name("parameters", [second])
        assert ledger.live_bytes == 8 * KB
        del first
        third = (second + 1).add_(1)
        assert ledger.live_bytes == ledger.peak_bytes == 8 * KB
        fourth = third.exp()
        del second, third
        assert ledger.live_bytes == 4 * KB and ledger.peak_bytes == 12 * KB
        assert {kind: size for kind, size in ledger.peak().items() if size} == {
            "parameters": 4 * KB,
            "activations": 8 * KB,
        }
        ledger.forget_peak()
        del fourth
        assert ledger.peak_bytes == 4 * KB and ledger.live_bytes == 0


def test_attention_with_dropout_is_counted_as_a_gpu_computes_it() -> None:
    with FakeTensorMode(), FusedAttention(), Ledger() as ledger:
        query = torch.empty(1, 1, 256, 8, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, None, 0.1).sum().backward()
    assert ledger.peak_bytes < 256 * 256 * 4, "the scores of all pairs are there at a time"


def _footprint(rehearsal: Rehearsal, *choices: str, ranks: int = 4, accumulation: int = 1) -> Footprint:
    config = settings(*MLP, *choices)
    with rehearsal.under(config, World(ranks, ranks)) as stage:
        return stage.footprint(8, accumulation)


def test_each_strategy_and_choice_takes_its_own() -> None:
    rehearsal = Rehearsal(settings(*MLP))
    small, fsdp = "strategy.unit_min_params=1000", "strategy=fsdp"
    single = _footprint(rehearsal, "strategy=single", ranks=1)
    ddp = _footprint(rehearsal, "strategy=ddp")
    whole = _footprint(rehearsal, fsdp, small)
    never = _footprint(rehearsal, fsdp, small, "strategy.reshard_after_forward=false")
    ahead = _footprint(rehearsal, fsdp, small, "strategy.prefetch_units=3")
    twice = _footprint(rehearsal, fsdp, small, accumulation=2)
    sharded = _footprint(rehearsal, fsdp, small, "strategy.reduce_every_micro_batch=true", accumulation=2)
    offloaded = _footprint(rehearsal, fsdp, small, "strategy.cpu_offload=true")
    hybrid = _footprint(rehearsal, fsdp, small, "strategy.shard_group=2")
    num_bytes = 4 * NUM_PARAMETERS
    for found in (single, ddp):
        for kind in ("parameters", "optimizer"):
            assert found.parts[kind] == num_bytes
    assert ddp.parts["gradients"] == num_bytes and ddp.peak >= single.peak
    assert num_bytes / 4 <= whole.parts["parameters"] <= num_bytes / 4 * 1.1
    assert num_bytes / 2 <= hybrid.parts["parameters"] <= num_bytes / 2 * 1.1
    assert whole.peak < hybrid.peak < ddp.peak
    assert never.peak > whole.peak < ahead.peak
    assert whole.peak < sharded.peak < twice.peak
    assert offloaded.peak + offloaded.host == whole.peak and offloaded.parts["parameters"] == 0
    assert whole.start < single.start, "sharded unit by unit, never whole"


@pytest.mark.parametrize(
    ("peak", "answer"),
    [
        (lambda size: 100 + 7 * size, 128),
        (lambda size: max(900, 12 * size), 83),
        (lambda size: max(100 + size, 40 * size - 3000), 100),
        (lambda size: 1001, 0),
        (lambda size: 500, MOST),
        (lambda size: 999 * size, 1),
    ],
)
def test_the_largest_micro_batch_is_found_in_few_tries(peak: Callable[[int], int], answer: int) -> None:
    tried = []

    def counted(size: int) -> int:
        tried.append(size)
        return peak(size)

    assert largest_micro_size(counted, 1000, 4) == answer
    assert len(tried) <= 6, tried


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world", "4", "--per-host", "2", "--gpu-gb", "0.01", "--reserve-gb", "0"]
    main([*MLP, "strategy=ddp", *options, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["number"] == NUM_PARAMETERS
    assert found["ddp"]["micro_batch"] == 16 and found["ddp"]["peak"] < 10e6
    assert found["ddp"]["largest_micro_batch"] > 100
    with pytest.raises(SystemExit) as end:
        main([*MLP, "strategy=parameter_server"])
    assert end.value.code == 2 and "strategy=parameter_server with parts" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*MLP, "strategy.shard_groop=2"])
    assert end.value.code == 2 and "shard_groop=2 is no setting of single" in capsys.readouterr().err
