"""The memory of a run, counted with fake tensors."""

import json
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.dry_run import DryRun, Footprint
from planner.fit import MOST, largest_micro_batch_size
from planner.ledger import MemoryLedger
from planner.memory import STRATEGIES, main
from planner.pretend import DryRunWorld, FusedAttention, repeated
from tests.runs import settings
from trainer.errors import UserError

MLP = ("data=digits", "model=mlp", "model.hidden=[128,128,128,128]", "optim.lr=0.1")
NUM_PARAMETERS = 64 * 128 + 3 * 128**2 + 128 * 10 + 4 * 128 + 10
KB = 1024


def test_memory_counts_until_a_tensor_is_freed() -> None:
    with FakeTensorMode(), MemoryLedger() as ledger:
        account = ledger.accounts[torch.device("cpu")]
        first = torch.empty(KB)
        second = first.view(32, 32) * 2
        ledger.name("parameters", [second])
        assert account.live_bytes == 8 * KB
        del first
        third = (second + 1).add_(1)
        assert account.live_bytes == account.peak_bytes == 8 * KB
        fourth = third.exp()
        del second, third
        assert account.live_bytes == 4 * KB and account.peak_bytes == 12 * KB
        assert {kind: size for kind, size in account.peak().items() if size} == {
            "parameters": 4 * KB,
            "activations": 8 * KB,
        }
        ledger.forget_peaks()
        del fourth
        assert account.peak_bytes == 4 * KB and account.live_bytes == 0


def test_attention_with_dropout_counts_as_on_a_gpu() -> None:
    with FakeTensorMode(), FusedAttention(), MemoryLedger() as ledger:
        query = torch.empty(1, 1, 256, 8, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, None, 0.1).sum().backward()
    assert ledger.accounts[torch.device("cpu")].peak_bytes < 256 * 256 * 4, (
        "the scores of all pairs are there at a time"
    )


def _footprint(
    dry_run: DryRun, *choices: str, ranks: int = 4, per_host: int | None = None, accumulation: int = 1
) -> Footprint:
    config = settings(*MLP, *choices)
    with dry_run.under(config, DryRunWorld(ranks, per_host or ranks)) as stage:
        return stage.footprint(8, accumulation)


@pytest.mark.slow
def test_memory_of_each_strategy_and_choice() -> None:
    dry_run = DryRun(settings(*MLP))
    fsdp = ("strategy=fsdp", "strategy.unit_min_params=1000")
    single = _footprint(dry_run, "strategy=single", ranks=1)
    ddp = _footprint(dry_run, "strategy=ddp")
    leaves = _footprint(dry_run, "strategy=ddp", "train.exact=4")
    assert leaves.peak == ddp.peak + 8 * NUM_PARAMETERS, "one chunk a rank: messages alone"
    whole = _footprint(dry_run, *fsdp)
    hybrid = _footprint(dry_run, *fsdp, "strategy.shard_group=2")
    num_bytes = 4 * NUM_PARAMETERS
    for found in (single, ddp):
        for kind in ("parameters", "optimizer"):
            assert found.parts[kind] == num_bytes
    assert ddp.parts["gradients"] == num_bytes and ddp.peak >= single.peak
    assert num_bytes / 4 <= whole.parts["parameters"] <= num_bytes / 4 * 1.1
    assert num_bytes / 2 <= hybrid.parts["parameters"] <= num_bytes / 2 * 1.1
    assert whole.peak < hybrid.peak < ddp.peak
    assert whole.start < single.start, "sharded unit by unit, never whole"
    never = _footprint(dry_run, *fsdp, "strategy.reshard_after_forward=false")
    twice = _footprint(dry_run, *fsdp, accumulation=2)
    offloaded = _footprint(dry_run, *fsdp, "strategy.cpu_offload=true")
    assert whole.peak < never.peak and whole.peak < twice.peak
    assert offloaded.peak + offloaded.host == whole.peak and offloaded.parts["parameters"] == 0


@pytest.mark.slow
def test_memory_of_servers_and_workers() -> None:
    dry_run = DryRun(settings(*MLP))

    def rank(number: int, *choices: str) -> Footprint:
        config = settings(*MLP, "optim=adamw", "strategy=parameter_server", *choices)
        with dry_run.under(config, DryRunWorld(4, 4, number)) as stage:
            return stage.footprint(8, 1)

    num_bytes = 4 * NUM_PARAMETERS
    server, worker, every = rank(0), rank(1), rank(0, "strategy.servers=all")
    for found, state in ((server, 2.0), (worker, 0.0), (every, 2 / 4)):
        assert found.parts["parameters"] == num_bytes
        assert found.parts["optimizer"] == pytest.approx(state * num_bytes, rel=0.5), "of what it owns"
    assert worker.peak == pytest.approx(3 * num_bytes, rel=0.05), "with what it pushes, and what it pulls"


def test_the_batch_dimension_is_the_one_that_grows() -> None:
    one = {"rows": torch.ones(1, 5), "time_first": torch.ones(7, 1), "table": torch.ones(3, 3), "name": "a"}
    two = {"rows": torch.ones(2, 5), "time_first": torch.ones(9, 2), "table": torch.ones(3, 3), "name": "a"}
    made = repeated(one, two, 8)
    shapes = {name: tuple(value.shape) for name, value in made.items() if name != "name"}
    assert shapes == {"rows": (8, 5), "time_first": (7, 8), "table": (3, 3)}
    assert repeated([torch.ones(1, 4)], [torch.ones(1, 4)] * 2, 8)[0].shape == (8, 4)


def test_dp_with_several_gpus_is_refused_in_one_line() -> None:
    config = settings(*MLP, "strategy=dp")
    dry_run = DryRun(config)
    several = dry_run.under(config, DryRunWorld(1, 4))
    with pytest.raises(UserError, match="strategy=dp on 4 GPUs is not supported"), several:
        pass


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
def test_the_largest_micro_batch_is_found_in_few_attempts(peak: Callable[[int], int], answer: int) -> None:
    tried = []

    def counted(size: int) -> int:
        tried.append(size)
        return peak(size)

    assert largest_micro_batch_size(counted, 1000, 4) == answer
    assert len(tried) <= 6, tried


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world", "4", "--per-host", "2", "--gpu-gb", "0.01", "--reserve-gb", "0"]
    main([*MLP, "strategy=ddp", *options, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["number"] == NUM_PARAMETERS
    assert found["ddp"]["micro_batch"] == 16 and found["ddp"]["peak"] < 10e6
    assert found["ddp"]["largest_micro_batch"] > 100
    with pytest.raises(SystemExit) as end:
        main([*MLP, "strategy=parameter_server", "--world", "1"])
    assert end.value.code == 2 and "start 2 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main([*MLP, "strategy.shard_groop=2"])
    assert end.value.code == 2 and "shard_groop=2 is not a setting of single" in capsys.readouterr().err


@pytest.mark.slow
def test_all_strategies_are_compared_with_reasons_for_refusals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*MLP, "--world", "4", "--per-host", "2"])
    text = capsys.readouterr().out
    names = ("single", "ddp", "fsdp", "hybrid")
    names += ("parameter_server, server", "parameter_server, worker")
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == list(names)
    assert "not compiled" in lines[0]
    assert [line.split()[-1] for line in lines[-2:]] == ["-", "21"], "a server computes no batch"
    two = {name: STRATEGIES[name] for name in ("parameter_server", "ddp")}
    monkeypatch.setattr("planner.memory.STRATEGIES", two)
    with pytest.raises(SystemExit) as end:  # the first one's words, where all refuse
        main([*MLP, "optim.lr=-1", "--world", "2"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("optim.lr") == 1
