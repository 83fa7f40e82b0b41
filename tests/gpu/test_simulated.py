"""A run on a simulated accelerator: the kernels of a step, races between streams, and unneeded waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.simulated import CAN_SIMULATE, MAIN, SIM, Hangs, simulated
from tests.ranks import run_ranks
from tests.runs import context_of, steps_of
from tests.user_parts import Stripes
from trainer import accelerator
from trainer.distributed.collectives import broadcast_tensors
from trainer.errors import NonFiniteError, UserError
from trainer.evaluation import evaluate
from trainer.exact.buffers import ChunkBuffers
from trainer.failures.heartbeat import Heartbeat
from trainer.guards import failure_snapshot
from trainer.guards.replicas import ReplicaCheck
from trainer.log_step import log_step
from trainer.loop import fit
from trainer.report.run_hash import parameters_sha256
from trainer.report.weight_statistics import histograms
from trainer.start_table import start_table

pytestmark = pytest.mark.skipif(not CAN_SIMULATE, reason="this torch takes no device written in Python")
QUIET = (
    *("model=mlp", "data=digits", "logger=jsonl", "train.log_every_steps=1000", "train.eval_every_epochs=0"),
    *("checkpoint.every_epochs=null", "data.num_workers=0", "train.global_batch_size=32"),
    *("train.max_steps=8", "distributed.ranks_per_gpu=auto"),
)


def on_the_simulator(fn: Callable[..., Any], *args: Any, ranks: int = 1) -> list[Any]:
    """Run `fn` in separate processes that share a GPU."""
    return run_ranks(_within, ranks, fn, args, init=False, fresh=True)


def _within(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    enter, as_mps = Heartbeat.enter, fn in (trained_on_a_mac,)

    def note(heartbeat: Heartbeat, phase: str, *more: Any) -> None:
        SIM.phase = phase
        enter(heartbeat, phase, *more)

    Heartbeat.enter = note  # type: ignore[assignment, method-assign]
    with simulated(as_mps):
        found = fn(*args)
    assert not SIM.faults, SIM.faults
    return found


def counted(way: Iterator[None], steps: int = 2) -> dict[str, Any]:
    """Return the launches of the next steps by phase, and the source lines that wait and read."""
    next(way)  # the first makes the optimizer's state
    SIM.clear()
    for _ in itertools.islice(way, steps):
        pass
    by_phase = Counter[str]()
    for (phase, _), count in SIM.launches.items():
        by_phase[phase] += count / steps
    waits, reads = (
        [at for (_, at), n in of.items() for _ in range(n // steps)] for of in (SIM.waits, SIM.reads)
    )
    return {"launches": by_phase.total(), "by phase": dict(by_phase), "waits": waits, "reads": reads}


def plain_loop(run: Any) -> Iterator[None]:
    """Train the same model, task and optimizer in the loop of torch's tutorials."""
    for batch in run.data.train_loader.epoch(0):
        run.task.loss(run.model, run.data.to_device(batch)).backward()
        run.state.optimizer.step()
        run.state.optimizer.zero_grad(set_to_none=True)
        yield


WAYS = {
    "single": (),
    "clip": ("train.clip_grad_norm=1",),
    "accumulation": ("train.micro_batch_size=8",),
    "ema": ("ema.decay=0.9",),
    "may skip": ("train.skip_nonfinite=2",),
    "fp16": ("train.precision=fp16",),
    "exact": ("train.exact=2",),
}


def steps_beside_a_plain_loop(folder: Path) -> dict[str, Any]:
    found = {}
    for name, overrides in WAYS.items():
        with context_of(*QUIET, *overrides, f"run_dir={folder}/{name}") as run:
            shares: list[nn.Module] = []
            run.strategy.share_buffers = shares.append  # type: ignore[method-assign]
            found[name] = counted(steps_of(run)) | {"log": list(SIM.log)}
            assert len(shares) == 3, "once in each step"
            if name == "single":
                found["plain"] = counted(plain_loop(run))
    return found


def test_a_step_launches_few_more_kernels_than_a_plain_loop_and_waits_once(tmp_path: Path) -> None:
    (found,) = on_the_simulator(steps_beside_a_plain_loop, tmp_path)
    plain, log = found["plain"]["launches"], found["single"].pop("log")
    more = {name: each["launches"] - plain for name, each in found.items()}
    assert more["single"] <= 7 and more["clip"] <= 12 and more["ema"] <= 12 and more["may skip"] <= 8, more
    assert more["accumulation"] <= 8 + 3 * (plain + 12), more  # gradients are added, too
    for name, each in found.items():
        assert len(each["waits"]) <= (name != "plain") and not each["reads"], (
            name,
            each["waits"],
            each["reads"],
        )
    order = [what for _, what, _ in log]
    assert order.index("_fused_sgd_") < order.index("waits")  # so that the queue does not run dry meanwhile
    copied = order.index("_to_copy")  # of the next batch, while this one's gradients are computed
    assert order.index("nll_loss_backward") < copied < order.index("_fused_sgd_") and log[copied][0] != "main"


def steps_of_two(folder: Path, comm: str) -> dict[str, Any]:
    with context_of(*QUIET, "strategy=ddp", comm, "optim=adamw", f"run_dir={folder}") as run:
        found = counted(way := steps_of(run))
        of = {"vote": "step_vote.py", "schedule": "comm/executor.py"}
        for what, file in of.items():
            found[what] = {stream for stream, _, at in SIM.log if file in at} - {"host", "comm"}
        list(way)
        broadcast_tensors(tensors := [torch.ones(3, device=run.ranks.device) for _ in range(9)], 0)
        SIM.clear()
        broadcast_tensors(tensors, 0)
        found["of a broadcast"] = SIM.launches.total()
        found["table"] = start_table(run)
        return found | {"weights": [p.detach().cpu() for p in run.state.model.parameters()]}


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["comm=native", "comm=ring"])
def test_ranks_wait_only_for_the_step_vote_and_the_norm(comm: str, tmp_path: Path) -> None:
    """With DDP's hooks, and with the executor on a separate stream."""
    found = on_the_simulator(steps_of_two, tmp_path, comm, ranks=2)
    right = run_ranks(steps_of_two, 2, tmp_path / "cpu", comm, init=False)[0]["weights"]
    for each in found:
        assert len(each["waits"]) == 2 and not each["reads"], each
        assert len(each["vote"]) == 1 and "main" not in each["vote"] | each["schedule"], (
            "beside the backward pass"
        )
        assert len(each["schedule"]) == (comm == "comm=ring")
        assert "2 ranks on each GPU, so the speed" in each["table"]
        assert each["of a broadcast"] <= 3
        assert all(map(torch.equal, each["weights"], right))


def saved_on_failure(folder: Path, when: str) -> tuple[str, bool]:
    """Return the message of a save on failure while the GPU waits for gradients, and whether it is of step 3."""
    said = []
    failure_snapshot._UPDATE_S = 0.2
    with context_of(*QUIET, f"run_dir={folder}") as run:
        snapshot: Any = run.guards.snapshot
        for _ in itertools.islice(way := steps_of(run), 3):
            pass
        before, streams = [parameter.cpu() for parameter in run.state.model.parameters()], len(SIM.streams)

        def save() -> None:
            try:
                snapshot.freeze(failed=True)
                if when == "the gradients come meanwhile":
                    MAIN.hangs_from = float("inf")
                snapshot.save()
                said.append("step 3 is saved")
            except UserError as error:
                said.append(str(error))

        SIM.hung = save
        MAIN.hang()
        if when == "the last update is not made":
            with snapshot.update(3):
                torch.zeros(1, device=run.ranks.device).add_(1)
            save()
        else:
            with pytest.raises(Hangs):
                next(way)
    assert len(SIM.streams) == streams, "a GPU that is full may have no room for another"
    MAIN.hangs_from = float("inf")
    if when != "the gradients never come":
        return said[0], False
    with context_of(*QUIET, f"run_dir={folder}", "resume=auto") as again:
        now = [parameter.cpu() for parameter in again.state.model.parameters()]
        return said[0], again.state.progress.step == 3 and all(map(torch.equal, before, now))


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("the gradients never come", "step 3 is saved"),
        pytest.param(
            "the gradients come meanwhile",
            "the gradients of the next step arrived during the save",
            marks=pytest.mark.slow,
        ),
        pytest.param("the last update is not made", "has not finished step 3", marks=pytest.mark.slow),
    ],
)
def test_a_save_on_failure_excludes_a_queued_update(when: str, words: str, tmp_path: Path) -> None:
    ((said, is_whole),) = on_the_simulator(saved_on_failure, tmp_path, when)
    assert said.endswith(words), said
    assert is_whole == (when == "the gradients never come")


OWN_MODEL = ("model._target_=tests.user_parts.Tiny",)
OWN_MODEL += ("~model.input_shape", "~model.num_classes", "~model.hidden")


class NanOnce(Stripes):
    """Sample 40, which is in the second batch of each epoch, is NaN."""

    def epoch_order(self, generator: torch.Generator) -> torch.Tensor:
        return torch.arange(len(self))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), torch.nan) if index == 40 else self.rows[index], self.labels[index]


def steps_without_nan(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Return weights and averages after a run that a NaN ended, or that skipped the step."""
    found = {}
    for name, overrides in {"ends": (), "skips": ("train.skip_nonfinite=1", "ema.decay=0.9")}.items():
        data = "data.dataset._target_=tests.gpu.test_simulated.NanOnce"
        with context_of(*QUIET, *OWN_MODEL, data, *overrides, f"run_dir={folder}/{name}") as run:
            way = steps_of(run)
            next(way)
            before = [parameter.detach().clone() for parameter in run.state.model.parameters()]
            if name == "ends":
                with pytest.raises(NonFiniteError):
                    next(way)
                assert all(map(torch.equal, before, run.state.model.parameters())), "the last step is kept"
            else:
                list(way)
            average = run.state.average
            averages = [] if average is None else [tensor for _, tensor in average.named_parameters()]
            found[name] = [each.detach().cpu() for each in (*run.state.model.parameters(), *averages)]
    return found


@pytest.mark.slow
def test_a_nan_reaches_neither_weights_nor_the_ema(tmp_path: Path) -> None:
    """The update is queued before the host knows the norm, unless steps may be skipped."""
    (found,) = on_the_simulator(steps_without_nan, tmp_path)
    right = run_ranks(steps_without_nan, 1, tmp_path / "cpu", init=False)[0]
    for name, tensors in found.items():
        assert all(tensor.isfinite().all() for tensor in tensors), name
        assert all(map(torch.equal, tensors, right[name])), name


NORMED = ("model._target_=tests.user_parts.Normed", "data.dataset._target_=tests.user_parts.Stripes")
NORMED += ("~model.input_shape", "~model.num_classes", "~model.hidden")


def saves(folder: Path) -> list[bytes]:
    """Return when saves copy: running statistics at once, weights before the next update."""
    use = accelerator.use

    def late(device: torch.device) -> None:
        if threading.current_thread().name == "staging":
            time.sleep(0.3)
        use(device)

    accelerator.use = late
    for name in ("false", "true"):
        every = ("checkpoint.every_steps=3", f"checkpoint.async={name}", "optim=adamw")
        with context_of(*QUIET, *NORMED, *every, f"run_dir={folder}/{name}") as run:
            SIM.clear()
            fit(run)
            waited = [at for _, at in SIM.reads if "checkpoint/writing.py" in at]
            assert not waited or name == "false", "all copies are queued before the thread waits"
    return [file.read_bytes() for file in sorted(folder.glob("*/checkpoints/step_00000006/*.safetensors"))]


@pytest.mark.slow
def test_an_async_save_copies_the_state_of_its_step(tmp_path: Path) -> None:
    (found,) = on_the_simulator(saves, tmp_path)
    assert len(found) == 4 and found[:2] == found[2:]


def readings(folder: Path) -> dict[str, Any]:
    """Return how often the host reads, how often it launches work on the state, and the launches."""
    found = {}
    with context_of(*QUIET, "train.eval_every_epochs=1", "optim=adamw", f"run_dir={folder}") as run:
        next(steps_of(run))
        check, device = ReplicaCheck(run.ranks, [(0,)], 1), run.ranks.device
        part = torch.ones((), device=device)
        run.report.meter.parts.add({"part": part}, 1, 1)
        part.add_(1)  # as the replay of a CUDA graph
        found["part"] = run.report.meter.parts._step_parts.pop()[1].item()
        run.report.meter.start()
        SIM.clear()
        run.report.meter.pause()
        found["pause"] = SIM.waits.total()
        norms = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5))).to(device)
        buffers, rows = ChunkBuffers(norms, 1), torch.ones(3, 4, device=device)

        def leaf() -> None:
            buffers.start_chunk()
            norms(rows)
            buffers.end_chunk()
            buffers.finish()

        actions: dict[str, Callable[[], object]] = {
            "evaluation": lambda: evaluate(run.model_context, run.data.eval_loader),  # type: ignore[arg-type]
            "replicas": lambda: check.check(run.state),
            "log": lambda: log_step(run, torch.ones((), device=device)),
            "histograms": lambda: histograms(run.state.model.named_parameters(), device),
            "exact buffers": leaf,
        }
        for name, action in actions.items():
            first = action()  # makes what is made once
            check._checked_at = None
            SIM.clear()
            again = action()
            found[name] = SIM.reads.total(), SIM.launches.total() / len(list(run.state.replicated()))
            found[f"{name} launches"] = {what for _, what, _ in SIM.log}
            found[f"{name} copies"] = {stream for stream, what, at in SIM.log if "data/device.py" in at}
            if name == "evaluation":  # the first had a training batch that was copied ahead
                found["evaluations"] = [one.sums.tolist() for one in (first, again)]  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
def test_values_between_steps_need_few_syncs(tmp_path: Path) -> None:
    (found,) = on_the_simulator(readings, tmp_path)
    assert found["evaluation"][0] <= 4 and found["log"][0] <= 8 and found["exact buffers"][0] == 1, found
    assert found["replicas"][0] <= 2 and found["replicas"][1] <= 4, found
    assert found["evaluations"][0] == found["evaluations"][1], "the same samples"
    assert found["evaluation copies"] and "main" not in found["evaluation copies"], (
        "while the last batch is evaluated"
    )
    assert found["pause"] == 1, "the time until then includes the device's"
    assert found["part"] == 1, "a part is kept until it is added up"
    assert "histc" not in found["histograms launches"], "which raises under train.exact on CUDA"


class Doubles(Stripes):
    """Samples in NumPy's float64, which the device lacks, with two targets or class probabilities."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index].double(), nn.functional.one_hot(self.labels[index], 2).double()


MAC = (
    *QUIET,
    "strategy=single",
    "train.eval_every_epochs=1",
    "optim=adamw",
    "checkpoint.every_steps=4",
    "checkpoint.async=true",
    "train.log_every_steps=4",
)
OF_DOUBLES = (*OWN_MODEL, "data.dataset._target_=tests.gpu.test_simulated.Doubles")
ON_A_MAC: dict[str, tuple[str, ...]] = {
    "classes": ("train.histograms_every=4",),
    "probabilities": OF_DOUBLES,
    "targets": (*OF_DOUBLES, "data.task._target_=trainer.tasks.Regression", "~data.task.label_smoothing"),
}


def trained_on_a_mac(folder: Path) -> dict[str, list[str]]:
    """Return for each task the hash of a run, and of a run that is resumed half-way."""
    hashes = {}
    for task, overrides in ON_A_MAC.items():
        found = []
        for name, last in (("whole", 8), ("resumed", 4), ("resumed", 8)):
            words = (f"train.max_steps={last}", "schedule=constant", f"run_dir={folder}/{task}-{name}")
            with context_of(*MAC, *overrides, *words, "resume=auto") as run:
                metrics = fit(run)
                assert metrics["steps"] == last and 0 < metrics["eval/loss"] < 10, metrics
                assert run.report.weight_statistics.histograms or task != "classes"
                found.append(parameters_sha256(run.state.model))
        hashes[task] = found
    return hashes


def test_a_run_on_mps_trains_saves_and_resumes(tmp_path: Path) -> None:
    """On a simulated device, which has no float64, collectives and streams."""
    (found,) = on_the_simulator(trained_on_a_mac, tmp_path)
    for whole, half, resumed in found.values():
        assert whole == resumed != half, found
