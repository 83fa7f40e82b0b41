"""The same training under bare PyTorch, Lightning Fabric, Lightning, Accelerate and Ringmaster.

Two jobs: the MLP on the digits, batch 64 a process, SGD with momentum; a GPT of 842,496 parameters on bytes,
batch 16 a process, AdamW, clipping. Each harness gets the same initial weights, batches and steps, in one
process or as DDP in two; that the work is equal shows in the norm of the weights at the end.
`batches` is the bare loop that reads a batch by one index; all others but Ringmaster read sample by sample.

Rounds are repeated in a newly drawn order. Printed are medians, and the ratio to `batches` within a round:
    ms      wall time of a step, after a quarter of them
    cpu ms  processor time of rank 0 for a step, as before
    start   seconds from the launch to the end of the first step
    save    seconds of a checkpoint by the harness's own means (Ringmaster: hashed, and on disk by fsync)
    resume  as start, from that checkpoint
    MiB     peak memory of rank 0

    pip install 'ringmaster-trainer[peers]'
    python -m benchmarks.peers [--jobs mlp gpt] [--processes 1 2] [--rounds 5] [--out FILE.json]
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from models.gpt import GPT
from models.mlp import MLP
from trainer.data.digits import Digits
from trainer.data.text.in_memory import Text

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FIRST = "batches"  # of all ratios
GPT_SCHEDULE = ("schedule.warmup_steps=0", "~schedule.final_fraction")
MORE = 2  # steps of a resumed run


class Bytes(Text):
    """Windows that begin at the same places in each epoch."""

    @property
    def draw(self) -> Any:  # type: ignore[override]
        raise AttributeError("draw")


class Job:
    """What all do alike."""

    def __init__(self, name: str) -> None:
        self.is_gpt = name == "gpt"
        self.batch, self.steps, self.log_every = (16, 100, 25) if self.is_gpt else (64, 400, 50)
        self.data: Any = Bytes("train") if self.is_gpt else Digits("train")

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(256, 128) if self.is_gpt else MLP((1, 8, 8), 10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.is_gpt:
            return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def overrides(self) -> list[str]:
        """The same for Ringmaster."""
        common = ["schedule=constant", "train.eval_every_epochs=0", "checkpoint.every_epochs=null", "seed=0"]
        common += [
            f"strategy={'ddp' if WORLD > 1 else 'single'}",
            f"train.global_batch_size={self.batch * WORLD}",
        ]
        common += [f"train.log_every_steps={self.log_every}", "train.epochs=1000", "optim.weight_decay=0"]
        if self.is_gpt:
            return [
                "experiment=text_gpt",
                *common,
                "data.dataset._target_=benchmarks.peers.Bytes",
                *GPT_SCHEDULE,
            ]
        return [*common, "data.task.label_smoothing=0", "optim.lr=0.05"]


class Order(Sampler[list[int]]):
    """The indices of this rank's batches from `first_step` on, as Ringmaster draws them."""

    def __init__(self, job: Job, first_step: int) -> None:
        self._job, self._first_step = job, first_step
        self._per_epoch = len(job.data) // (job.batch * WORLD)

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Of one epoch, which begins in its middle where a run goes on."""
        epoch, first = divmod(self._first_step, self._per_epoch)
        order = torch.randperm(len(self._job.data), generator=torch.Generator().manual_seed(epoch))
        for step in range(first, self._per_epoch):
            self._first_step += 1
            begin, size = step * self._job.batch * WORLD, self._job.batch * WORLD
            yield order[begin + RANK : begin + size : WORLD].tolist()


class BySamples(Dataset[Any]):
    """Without `__getitems__`, as most datasets are."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


class Marks:
    """Notes what a run does; written to a file by rank 0."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.times: list[tuple[float, float]] = []
        self.first_at = 0.0
        self.facts: dict[str, float] = {}

    def step(self) -> bool:
        """Note the end of a step; whether it was the last one."""
        self.times.append((time.perf_counter(), time.process_time()))
        self.first_at = self.first_at or time.time()
        return len(self.times) == self._steps

    def saved(self, model: nn.Module, seconds: float) -> None:
        """The trained model, whose checkpoint took so long."""
        norm = torch.stack([parameter.detach().double().norm() for parameter in model.parameters()]).norm()
        self.facts |= {"save": seconds, "norm": norm.item()}

    def write(self, out: Path) -> None:
        skipped = len(self.times) // 4
        (begin, cpu_begin), (end, cpu_end) = self.times[skipped], self.times[-1]
        number = len(self.times) - 1 - skipped
        self.facts |= {
            "ms": 1e3 * (end - begin) / max(1, number),
            "cpu ms": 1e3 * (cpu_end - cpu_begin) / max(1, number),
            "first_at": self.first_at,
            "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if RANK == 0:
            out.write_text(json.dumps(self.facts))


# ---- the harnesses: each trains `marks` steps, from `start` if it is not None, and saves to `to`


def bare(job: Job, marks: Marks, start: Path | None, to: Path, by_batches: bool = False) -> None:
    model = job.model()
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
    optimizer = job.optimizer(model)
    first_step = 0
    if start is not None:
        saved = torch.load(start)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_step = saved["step"]
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    order, writer = Order(job, first_step), _writer(to)
    loader = DataLoader(BySamples(job.data), batch_sampler=order)
    wrapped.train()
    step = 0
    while True:
        for inputs, targets in map(job.data.__getitems__, order) if by_batches else loader:
            loss = job.loss(wrapped, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            if job.is_gpt:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if writer and step % job.log_every == 0:
                writer.add_scalar("loss", loss.item(), step)
            if marks.step():
                begin = time.perf_counter()
                if RANK == 0:
                    facts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(facts | {"step": first_step + step}, to)
                marks.saved(model, time.perf_counter() - begin)
                return


def batches(job: Job, marks: Marks, start: Path | None, to: Path) -> None:
    bare(job, marks, start, to, by_batches=True)


def fabric(job: Job, marks: Marks, start: Path | None, to: Path) -> None:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    runner.launch()
    model, optimizer = runner.setup(plain := job.model(), job.optimizer(plain))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if start is not None:
        runner.load(start, state)
    first_step = state["step"]
    data = DataLoader(BySamples(job.data), batch_sampler=Order(job, first_step))
    loader, writer = runner.setup_dataloaders(data, use_distributed_sampler=False), _writer(to)
    model.train()
    step = 0
    while True:
        for inputs, targets in loader:
            loss = job.loss(model, inputs, targets)
            optimizer.zero_grad()
            runner.backward(loss)
            if job.is_gpt:
                runner.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            step += 1
            if writer and step % job.log_every == 0:
                writer.add_scalar("loss", loss.item(), step)
            if marks.step():
                begin = time.perf_counter()
                runner.save(to, {"model": model, "optimizer": optimizer, "step": first_step + step})
                marks.saved(model, time.perf_counter() - begin)
                return


def lightning(job: Job, marks: Marks, start: Path | None, to: Path) -> None:
    import lightning as L
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = job.loss(self.model, *batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self.model)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            marks.step()

    first_step = int(start.with_suffix(".step").read_text()) if start is not None else 0
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_epochs=-1,
        max_steps=job.steps if start is None else first_step + MORE,
        gradient_clip_val=1.0 if job.is_gpt else None,
        log_every_n_steps=job.log_every,
        logger=TensorBoardLogger(str(to.parent / "logs")),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader = DataLoader(BySamples(job.data), batch_sampler=Order(job, first_step))
    trainer.fit(module := Module(), loader, ckpt_path=start)
    begin = time.perf_counter()
    trainer.save_checkpoint(to)
    marks.saved(module, time.perf_counter() - begin)
    to.with_suffix(".step").write_text(str(trainer.global_step))


def accelerate(job: Job, marks: Marks, start: Path | None, to: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(plain := job.model(), job.optimizer(plain))
    first_step = 0
    if start is not None:
        accelerator.load_state(str(start))
        first_step = int((start / "step").read_text())
    # Not prepared: its loader would take this rank's batches apart once more.
    loader, writer = DataLoader(BySamples(job.data), batch_sampler=Order(job, first_step)), _writer(to)
    model.train()
    step = 0
    while True:
        for inputs, targets in loader:
            loss = job.loss(model, inputs, targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            if job.is_gpt:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if writer and step % job.log_every == 0:
                writer.add_scalar("loss", loss.item(), step)
            if marks.step():
                begin = time.perf_counter()
                accelerator.save_state(str(to))
                marks.saved(model, time.perf_counter() - begin)
                if RANK == 0:
                    (to / "step").write_text(str(first_step + step))
                return


def ringmaster(job: Job, marks: Marks, start: Path | None, to: Path) -> None:
    from ringmaster import main
    from trainer import load_model, loop

    epoch_of, save_of = loop.train_epoch, loop.save

    def train_epoch(context: Any) -> Iterator[None]:
        for _ in epoch_of(context):
            marks.step()
            yield

    def save(context: Any, evaluation: Any = None) -> None:
        begin = time.perf_counter()
        save_of(context, evaluation)
        marks.facts["save"] = time.perf_counter() - begin

    loop.train_epoch, loop.save = train_epoch, save
    weights = to.with_suffix(".initial")
    steps = job.steps
    words = [f"model.init_from={weights}"]
    if start is not None:
        steps, words = job.steps + MORE, [f"resume={next((start / 'checkpoints').glob('step_*'))}"]
    elif RANK == 0:
        torch.save(job.model().state_dict(), weights)
    sys.argv = ["train.py", *job.overrides(), *words, f"train.max_steps={steps}", f"run_dir={to}"]
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.devnull
    main()
    if RANK == 0:
        marks.saved(load_model(to), marks.facts["save"])


HARNESSES = {each.__name__: each for each in (batches, bare, fabric, lightning, accelerate, ringmaster)}


def _writer(to: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(to.parent / "logs")) if RANK == 0 else None


# ---- measuring


def measure(harness: str, job: str, processes: int) -> dict[str, float]:
    """Train and save, then go on from there, each in new processes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = _launch(harness, job, processes, folder / "first")
        further = _launch(harness, job, processes, folder / "further", folder / "first" / "saved")
    return first | {"resume": further["start"]}


def _launch(
    harness: str, job: str, processes: int, folder: Path, start: Path | None = None
) -> dict[str, float]:
    folder.mkdir()
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["-m", "benchmarks.peers", "--be", harness, "--jobs", job, "--folder", str(folder)]
    command += ["--saved", str(start)] if start is not None else []
    begin = time.time()
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}{done.stderr[-4000:]}status {done.returncode} of {' '.join(command)}")
    facts: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return facts | {"start": facts.pop("first_at") - begin}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", nargs="+", default=["mlp", "gpt"], choices=["mlp", "gpt"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--harnesses", nargs="+", default=list(HARNESSES), choices=list(HARNESSES))
    parser.add_argument("--out", type=Path, help="write all figures as JSON, too")
    parser.add_argument("--be", choices=list(HARNESSES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        job = Job(arguments.jobs[0])
        marks = Marks(MORE if arguments.saved else job.steps)
        HARNESSES[arguments.be](job, marks, arguments.saved, arguments.folder / "saved")
        marks.write(arguments.folder / "figures.json")
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {date.today()}"
    everything: dict[str, Any] = {"machine": machine}
    for job_name in arguments.jobs:
        for processes in arguments.processes:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.harnesses}
            for _ in range(arguments.rounds):
                for name in random.sample(arguments.harnesses, len(arguments.harnesses)):
                    found[name].append(measure(name, job_name, processes))
            everything[f"{job_name} {processes}"] = found
            _print(job_name, processes, found)
            if arguments.out:
                arguments.out.write_text(json.dumps(everything, indent=1))


def _print(job: str, processes: int, found: dict[str, list[dict[str, float]]]) -> None:
    columns = ("ms", "cpu ms", "start", "save", "resume", "MiB", "norm")
    print(f"\n{job}, {processes} process(es)   ratio of ms: median, least and most")
    print(f"{'':12s}{'ratio':>20s}" + "".join(f"{column:>10s}" for column in columns))
    for name, rounds in found.items():
        line = ""
        if FIRST in found:
            ratios = sorted(one["ms"] / first["ms"] for one, first in zip(rounds, found[FIRST], strict=True))
            line = f"{statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        values = [statistics.median(one.get(column, float("nan")) for one in rounds) for column in columns]
        print(f"{name:12s}{line:>20s}" + "".join(f"{value:10.5g}" for value in values), flush=True)


if __name__ == "__main__":
    main()
