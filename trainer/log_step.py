"""Log the steps since the last log line: metrics, histograms and one line of output."""

from torch import Tensor

from trainer.accelerator import peak_memory_bytes
from trainer.context import Run


def log_step(run: Run, grad_norm: Tensor) -> None:
    """Log the steps since the last log line (a collective)."""
    progress, devices, data = run.state.progress, run.strategy.devices, run.data
    train, steps_before = run.config.train, run.plan.steps_before
    report = run.report
    run_log, meter, weight_statistics = report.run_log, report.meter, report.weight_statistics
    parts = meter.parts.means()
    values: dict[str, float] = {
        **{f"train/{name}": value for name, value in parts.items()},
        **meter.metrics(meter.window, train.global_batch_size),
        **run.state.learning_rates(),
        "train/grad_norm": grad_norm.item(),
        "train/epoch": progress.epochs(data.train_loader.num_samples),
        "train/update_to_weight": weight_statistics.update_to_weight(),
        **{f"usage/peak_mib/{device}": size / 2**20 for device, size in peak_memory_bytes(devices).items()},
        **run.strategy.report.metrics(),
        **run.checkpointer.metrics(),
    }
    if meter.window.steps == 0 and steps_before and not run.plan.logs(steps_before):
        values["train/loss_steps"] = meter.steps  # the steps before the resume are not in this mean
    if progress.skipped_steps:
        values["train/skipped_steps"] = progress.skipped_steps
    num_skipped = data.train_loader.num_skipped + (data.eval_loader.num_skipped if data.eval_loader else 0)
    if num_skipped:
        values["usage/skipped_samples"] = num_skipped  # on this rank
    run_log.scalars(values, progress.step)
    run_log.histograms(weight_statistics.histograms, progress.step)
    run_log.plots(run.strategy.report.plots, progress.step)
    if data.train_loader.num_samples is None:
        done = f"{progress.samples_seen:,} samples"
    else:
        done = f"epoch {values['train/epoch']:.2f}"
    words = ", ".join(f"{name} {value:.4f}" for name, value in parts.items())
    run_log.progress.step_line(
        f"step {progress.step}/{run.plan.total_steps}  {done}  "
        f"loss {values['train/loss']:.4f}{f' ({words})' if words else ''}  lr {values['train/lr']:.2e}  "
        f"{values['usage/samples_per_second']:.0f} samples/s"
    )


def log_first_step(run: Run) -> None:
    """Print the loss and duration of this process's first step, without logging metrics (a collective)."""
    meter, step = run.report.meter, run.state.progress.step
    (loss,) = meter.record_steps()
    seconds = meter.ms_per_step(meter.window)["step"] / 1e3
    run.report.run_log.progress.step_line(
        f"step {step}/{run.plan.total_steps}  loss {loss:.4f}  {seconds:.2f} s"
    )
