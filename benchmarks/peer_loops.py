"""Run one training of `benchmarks.peers` with one trainer, in the processes of one launch.

    python -m benchmarks.peer_loops TRAINER JOB FOLDER [CHECKPOINT]

Each trainer makes `measurements.num_steps` steps, starting from the checkpoint `start` if it is given, and
saves to FOLDER/saved. The measurements are written to FOLDER/measurements.json.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.peer_job import MORE_STEPS, RANK, WORLD, BySamples, Job, Measurements, Order


def _train(
    job: Job,
    measurements: Measurements,
    to: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[], Iterable[Any]],
    *,
    backward: Callable[[Tensor], None],
    clip: Callable[[], object],
    save: Callable[[int], None],
) -> None:
    """Train in a typical loop; the arguments are what differs between trainers.

    Args:
        batches: returns the batches of the next epoch.
        save: called with the number of steps.
    """
    writer, step = _writer(to), 0
    model.train()
    while True:
        for inputs, targets in batches():
            loss = job.loss(model, inputs, targets)
            optimizer.zero_grad()
            backward(loss)
            if job.is_gpt:
                clip()
            optimizer.step()
            step += 1
            if writer and step % job.log_every == 0:
                writer.add_scalar("loss", loss.item(), step)
            if measurements.record_step():
                begin = time.perf_counter()
                save(step)
                measurements.record_save(model, time.perf_counter() - begin)
                return


def plain(
    job: Job, measurements: Measurements, start: Path | None, to: Path, by_batches: bool = False
) -> None:
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
    order = Order(job, first_step)
    loader = DataLoader(BySamples(job.data), batch_sampler=order)

    def save(step: int) -> None:
        if RANK == 0:
            facts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(facts | {"step": first_step + step}, to)

    _train(
        *(job, measurements, to, wrapped, optimizer),
        lambda: map(job.data.__getitems__, order) if by_batches else loader,
        backward=Tensor.backward,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        save=save,
    )


def plain_batches(job: Job, measurements: Measurements, start: Path | None, to: Path) -> None:
    plain(job, measurements, start, to, by_batches=True)


def fabric(job: Job, measurements: Measurements, start: Path | None, to: Path) -> None:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    runner.launch()
    model, optimizer = runner.setup(own := job.model(), job.optimizer(own))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if start is not None:
        runner.load(start, state)
    first_step = state["step"]
    data = DataLoader(BySamples(job.data), batch_sampler=Order(job, first_step))
    loader = runner.setup_dataloaders(data, use_distributed_sampler=False)
    _train(
        *(job, measurements, to, model, optimizer),
        lambda: loader,
        backward=runner.backward,
        clip=lambda: runner.clip_gradients(model, optimizer, max_norm=1.0),
        save=lambda step: runner.save(to, state | {"step": first_step + step}),
    )


def lightning(job: Job, measurements: Measurements, start: Path | None, to: Path) -> None:
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
            measurements.record_step()

    first_step = int(start.with_suffix(".step").read_text()) if start is not None else 0
    trainer = L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_epochs=-1,
        max_steps=job.steps if start is None else first_step + MORE_STEPS,
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
    measurements.record_save(module, time.perf_counter() - begin)
    to.with_suffix(".step").write_text(str(trainer.global_step))


def accelerate(job: Job, measurements: Measurements, start: Path | None, to: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(own := job.model(), job.optimizer(own))
    first_step = 0
    if start is not None:
        accelerator.load_state(str(start))
        first_step = int((start / "step").read_text())
    # Not prepared, because Accelerate would divide this rank's batches again.
    loader = DataLoader(BySamples(job.data), batch_sampler=Order(job, first_step))
    _train(
        *(job, measurements, to, model, optimizer),
        lambda: loader,
        backward=accelerator.backward,
        clip=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        save=lambda step: accelerator.save_state(str(to)),
    )
    if RANK == 0:
        (to / "step").write_text(str(first_step + measurements.num_steps))


def ringmaster(job: Job, measurements: Measurements, start: Path | None, to: Path) -> None:
    from ringmaster import main
    from trainer import load_model, loop

    step_of, save_of = loop.make_step, loop.save

    def make_step(run: Any, batches: Any) -> Any:
        after = step_of(run, batches)
        measurements.record_step()
        return after

    def save(context: Any) -> None:
        begin = time.perf_counter()
        save_of(context)
        measurements.values["save"] = time.perf_counter() - begin

    loop.make_step, loop.save = make_step, save
    weights = to.with_suffix(".initial")
    steps = job.steps
    words = [f"model.init_from={weights}"]
    if start is not None:
        steps, words = job.steps + MORE_STEPS, [f"resume={next((start / 'checkpoints').glob('step_*'))}"]
    elif RANK == 0:
        torch.save(job.model().state_dict(), weights)
    sys.argv = ["train.py", *job.overrides(), *words, f"train.max_steps={steps}", f"run_dir={to}"]
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.devnull
    main()
    if RANK == 0:
        measurements.record_save(load_model(to), measurements.values["save"])


TRAINERS = {each.__name__: each for each in (plain_batches, plain, fabric, lightning, accelerate, ringmaster)}


def _writer(to: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(to.parent / "logs")) if RANK == 0 else None


def main() -> None:
    trainer_name, name, folder, *saved = sys.argv[1:]
    start, job = Path(saved[0]) if saved else None, Job(name)
    measurements = Measurements(MORE_STEPS if start is not None else job.steps)
    TRAINERS[trainer_name](job, measurements, start, Path(folder) / "saved")
    measurements.write(Path(folder) / "measurements.json")


if __name__ == "__main__":
    main()
