"""Logs the steps since the last time: metrics, histograms and a line."""

from torch import Tensor

from trainer.optim.param_groups import learning_rates
from trainer.training.context import TrainingContext
from trainer.training.meter import Mark, peak_memory_bytes


def log_step(context: TrainingContext, window: Mark, grad_norm: Tensor | None) -> None:
    """Log the steps since `window` (a collective)."""
    progress, devices = context.state.progress, context.strategy.devices
    values: dict[str, float] = {
        **context.meter.metrics(window, context.settings.global_batch_size),
        **learning_rates(context.state.optimizer, context.state.rates),
        "train/epoch": progress.epochs(context.train_loader.num_samples),
        "train/update_to_weight": context.weight_statistics.update_to_weight(),
        **{f"memory/peak_mib/{device}": size / 2**20 for device, size in peak_memory_bytes(devices).items()},
        **context.strategy.metrics(),
        **context.checkpointer.metrics(),
    }
    if grad_norm is not None:
        values["train/grad_norm"] = grad_norm.item()
    if context.state.skipped_updates:
        values["train/skipped_updates"] = context.state.skipped_updates
    if progress.skipped_steps:
        values["train/skipped_steps"] = progress.skipped_steps
    num_skipped = context.train_loader.num_skipped + (
        context.eval_loader.num_skipped if context.eval_loader else 0
    )
    if num_skipped:
        values["data/skipped_samples"] = num_skipped  # of this rank
    context.run_log.scalars(values, progress.step)
    context.run_log.histograms(context.weight_statistics.histograms, progress.step)
    context.run_log.plots(context.strategy.plots, progress.step)
    if context.train_loader.num_samples is None:
        done = f"{progress.samples_seen:,} samples"
    else:
        done = f"epoch {values['train/epoch']:.2f}"
    context.run_log.step_line(
        f"step {progress.step}/{context.total_steps}  {done}  "
        f"loss {values['train/loss']:.4f}  lr {values['train/lr']:.2e}  "
        f"{values['speed/samples_per_second']:.0f} samples/s"
    )
