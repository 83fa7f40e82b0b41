"""Logs the steps since the last time: metrics, histograms and a line."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.accelerator import peak_memory_bytes

if TYPE_CHECKING:
    from trainer.training.context import Run


def log_step(run: "Run", grad_norm: Tensor) -> None:
    """Log the steps since the last time (a collective)."""
    progress, devices = run.state.progress, run.strategy.devices
    parts = run.meter.parts.means()
    values: dict[str, float] = {
        **{f"train/{name}": value for name, value in parts.items()},
        **run.meter.metrics(run.meter.window, run.settings.global_batch_size),
        **run.state.learning_rates(),
        "train/grad_norm": grad_norm.item(),
        "train/epoch": progress.epochs(run.train_loader.num_samples),
        "train/update_to_weight": run.weight_statistics.update_to_weight(),
        **{f"memory/peak_mib/{device}": size / 2**20 for device, size in peak_memory_bytes(devices).items()},
        **run.strategy.report.metrics(),
        **run.checkpointer.metrics(),
    }
    if run.meter.window.steps == 0 and run.steps_before and not run.settings.logs(run.steps_before):
        values["train/loss_steps"] = run.meter.steps  # the steps before the resume are not in this mean
    if progress.skipped_steps:
        values["train/skipped_steps"] = progress.skipped_steps
    num_skipped = run.train_loader.num_skipped + (run.eval_loader.num_skipped if run.eval_loader else 0)
    if num_skipped:
        values["data/skipped_samples"] = num_skipped  # of this rank
    run.run_log.scalars(values, progress.step)
    run.run_log.histograms(run.weight_statistics.histograms, progress.step)
    run.run_log.plots(run.strategy.report.plots, progress.step)
    if run.train_loader.num_samples is None:
        done = f"{progress.samples_seen:,} samples"
    else:
        done = f"epoch {values['train/epoch']:.2f}"
    words = ", ".join(f"{name} {value:.4f}" for name, value in parts.items())
    run.run_log.progress.step_line(
        f"step {progress.step}/{run.total_steps}  {done}  "
        f"loss {values['train/loss']:.4f}{f' ({words})' if words else ''}  lr {values['train/lr']:.2e}  "
        f"{values['speed/samples_per_second']:.0f} samples/s"
    )


def log_first_step(run: "Run", losses: Sequence[Tensor]) -> None:
    """Print the loss and the time of this process's first step, alone (a collective).

    A slow run says early that it trains, and how fast. Nothing is logged, because the metrics of a log step
    are means since the one before.
    """
    step, loss = run.state.progress.step, run.meter.mean_of_step(losses)
    seconds = run.meter.ms_per_step(run.meter.window)["step"] / 1e3
    run.run_log.progress.step_line(f"step {step}/{run.total_steps}  loss {loss:.4f}  {seconds:.2f} s")
