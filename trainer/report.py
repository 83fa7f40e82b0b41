"""What is logged of the steps since the last time: figures, histograms, pictures and a line."""

from torch import Tensor

from trainer.groups import learning_rates
from trainer.job import Job
from trainer.metrics import Mark, Meter, peak_memory_bytes


def report(job: Job, meter: Meter, window: Mark, grad_norm: Tensor | None) -> None:
    """Log the steps since `window` (a collective)."""
    progress, devices = job.state.progress, job.strategy.devices
    values: dict[str, float] = {
        **meter.figures(window, job.settings.global_batch_size),
        **learning_rates(job.state.optimizer, job.state.rates),
        "train/epoch": progress.epochs(job.train_loader.num_samples),
        "train/update_to_weight": job.learning.update_to_weight(),
        **{f"memory/peak_mib/{device}": size / 2**20 for device, size in peak_memory_bytes(devices).items()},
        **job.strategy.metrics(),
    }
    if grad_norm is not None:
        values["train/grad_norm"] = grad_norm.item()
    num_skipped = job.train_loader.num_skipped + (job.eval_loader.num_skipped if job.eval_loader else 0)
    if num_skipped:
        values["data/skipped_samples"] = num_skipped  # of this rank
    job.run_log.scalars(values, progress.step)
    job.run_log.histograms(job.learning.histograms, progress.step)
    job.run_log.figures(job.strategy.figures, progress.step)
    job.run_log.step_line(
        f"step {progress.step}/{job.total_steps}  epoch {values['train/epoch']:.2f}  "
        f"loss {values['train/loss']:.4f}  lr {values['train/lr']:.2e}  "
        f"{values['speed/samples_per_second']:.0f} samples/s"
    )
