"""A run from start to end: from its settings to result.json."""

import dataclasses
import gc
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.assemble import assemble
from trainer.checkpoint.finding import saved_settings_of
from trainer.config import Config, TrainConfig, flatten, to_yaml
from trainer.context import Run
from trainer.data.loading.batch import split_batch
from trainer.distributed.agreement import compare_across_ranks, on_main
from trainer.distributed.gather_samples import gathering
from trainer.distributed.process_group import watched_process_group
from trainer.distributed.shrink import Shrunk
from trainer.errors import RetryableError, UserError, writing
from trainer.exact.environment import environment
from trainer.files import failure_file
from trainer.files.writing import atomic_file
from trainer.launch.new_process import has_launcher_on_host
from trainer.launch.rank_info import RankInfo, publish, rank_info
from trainer.launch.signals import StopRequest
from trainer.loop import fit
from trainer.micro_batch import with_micro_batch_size
from trainer.report import run_hash
from trainer.run_dir.attempts import record_attempt
from trainer.run_dir.claim import RunDir, claim
from trainer.run_dir.console import messages, table
from trainer.run_dir.metrics_file import write_result
from trainer.start_table import start_table
from trainer.troubleshooting import causes_named

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Train with the settings `config`, and return the contents of result.json."""
    here: RankInfo | None = None
    with StopRequest(has_launcher_on_host(rank_info(config.distributed))) as stop_request:
        while True:
            at_shrink = ExitStack()
            try:
                return _run(config, here, stop_request, at_shrink)
            except Shrunk as shrunk:
                here, run_dir = shrunk.rank_info, str(shrunk.run_dir)
                shrunk.__context__ = None  # it would keep the run alive
            at_shrink.close()
            gc.collect()  # frees, for example, DataLoaders, which then stop their workers
            publish(here)
            config = dataclasses.replace(config, run_dir=run_dir, resume="auto")


def _close(run_: Run) -> None:
    for end in (run_.report.profile.close, run_.strategy.close, run_.report.run_log.close):
        with suppress(Exception):  # a failed rank or disk may have broken it
            end()


def _run(
    config: Config, here: RankInfo | None, stop_request: StopRequest, at_shrink: ExitStack
) -> dict[str, Any]:
    """Run until the end of training, or until `Shrunk` is raised because ranks failed.

    Args:
        here: the rank info of this process after a shrink; None at the first start.
        at_shrink: receives the callbacks to call before the surviving ranks continue.
    """
    check_batch_sizes = _batch_size_check(config.train)
    with (
        watched_process_group(
            config.distributed, lambda: stop_request.is_set, here, check_batch_sizes
        ) as joined,
        ExitStack() as resources,
    ):
        ranks, watch = joined
        shared = {name: value for name, value in flatten(config).items() if name != "distributed.rank"}
        compare_across_ranks(shared, ranks)
        claimed, seed, previous_size = on_main(lambda: _claim(config, resources), ranks)
        run_dir = claimed.path
        config = dataclasses.replace(config, run_dir=str(run_dir), seed=seed)
        watch.ending.writes_to(run_dir, orderly=not claimed.used)
        with messages(ranks, run_dir) as open_log:
            config = with_micro_batch_size(config, previous_size, ranks)
            take_over = partial(_take_over, config, run_dir, open_log)
            if not claimed.used:
                on_main(take_over, ranks)
            run_ = assemble(config, claimed.run_id, ranks, stop_request, watch.ending.save)
            at_shrink.callback(_close, run_)
            if claimed.used:  # an error before this line leaves the previous run unchanged
                on_main(take_over, ranks)
                watch.ending.writes_to(run_dir)
            on_main(partial(_write_settings, run_.config, run_dir), ranks)
            run_.report.run_log.open()
            on_main(partial(_record_attempt, run_, run_dir), ranks)
            resources.callback(run_.report.run_log.progress.close)
            _log_start(run_)
            with causes_named(config.train), gathering(why_no_gather(run_)):
                metrics = fit(run_)
            run_.report.run_log.plots(run_.strategy.report.plots, run_.state.progress.step, at_end=True)
            result = _result(run_, metrics)
            run_.checkpointer.saving.wait()
            if summary := run_.strategy.report.summary():
                log.info("%s", summary)
            run_.vote.close()
            run_.strategy.close()
            if ranks.is_main:
                write_result(run_dir, result, made_steps=run_.state.progress.step > run_.plan.steps_before)
            run_.report.run_log.close()  # last, so that an error in a logger loses nothing else
            run_.checkpointer.finish_remote()
            _log_end(run_, metrics)
    return result


def _batch_size_check(train: TrainConfig) -> Callable[[int], object]:
    if train.exact is not None:  # chunks are divided among any number of ranks
        return lambda num_ranks: None
    return partial(split_batch, train.global_batch_size, train.known_micro_batch_size)


def _result(run_: Run, metrics: Mapping[str, float]) -> dict[str, Any]:
    strategy, ended_by = run_.strategy, run_.state.early_end.setting
    return {
        "strategy": strategy.name,
        "comm": strategy.algorithm,
        "world_size": run_.ranks.world_size,
        **{name: None if math.isnan(value) else value for name, value in metrics.items()},
        **strategy.report.measured(),
        **({"exact": run_.plan.exact} if run_.plan.exact else {}),
        **({"ended_by": ended_by} if ended_by else {}),
        **({"skip_steps": skip_steps} if (skip_steps := run_.config.train.skip_steps) else {}),
        "param_sha256": run_hash.parameters_sha256(run_.state.model),
    }


def _log_start(run_: Run) -> None:
    if run_.ranks.is_main:  # writing all settings takes longer than a step of a small model
        run_.report.run_log.texts({"config": f"```yaml\n{to_yaml(run_.config)}\n```"}, run_.plan.steps_before)
    log.info("%s", start_table(run_))
    for note in run_.strategy.notes:
        log.info("%s", note)


def _log_end(run_: Run, metrics: Mapping[str, float]) -> None:
    if not run_.ranks.is_main:
        return
    shown = [
        f"{name} {value:.4f}"
        for name, value in metrics.items()
        if (name == "train/loss" or name.startswith("eval/")) and not math.isnan(value)
    ]
    rows = {"finished": f"{metrics['steps']:,} steps, {', '.join(shown)}"}
    if best := run_.checkpointer.best_so_far(run_.state.progress.step):
        rows["best"] = "{} {:.4f} at step {}".format(*best)
    with suppress(UserError, RetryableError):  # the run is complete, even if its disk fails now
        if checkpoint := run_.checkpointer.best_or_newest():
            rows["checkpoint"] = str(checkpoint)
    log.info("%s", table(rows | {"view with": run_.report.run_log.look}))


def _claim(config: Config, resources: ExitStack) -> tuple[RunDir, int, int | None]:
    """Return the locked run directory, the seed, and, for a resumed run, its micro-batch size."""
    remote = config.checkpoint.remote
    run_dir = claim(config.run_dir, config.resume, resources, config.distributed.timeout_s / 2, remote)
    saved: Mapping[str, Any] = {}
    if config.resume is not None and (config.seed is None or config.train.micro_batch_size == "auto"):
        saved = saved_settings_of(run_dir.path, run_dir.run_id, config.resume, remote)
    seed = saved.get("seed") if config.seed is None else config.seed
    return run_dir, secrets.randbits(31) if seed is None else seed, saved.get("train.micro_batch_size")


def _take_over(config: Config, run_dir: Path, open_log: Callable[[], None]) -> None:
    """Replace a previous run's files in the run directory with those of this run; called on rank 0."""
    failure_file.remove(run_dir)
    _write_settings(config, run_dir)
    open_log()


def _record_attempt(run_: Run, run_dir: Path) -> None:
    facts, start = environment(run_.ranks.device), run_.checkpointer.start
    strategy, world_size = run_.strategy.name, run_.ranks.world_size
    record_attempt(run_dir, run_.plan.steps_before, strategy, world_size, facts, start)


def _write_settings(config: Config, run_dir: Path) -> None:
    with writing(run_dir), atomic_file(run_dir / "config.yaml") as file:
        file.write(to_yaml(config).encode())


def why_no_gather(run_: Run) -> str | None:
    """Return why `trainer.gather` is not supported by these settings; None if it is."""
    config = run_.config
    if config.train.exact is not None:
        return f"train.exact={config.train.exact} computes each chunk of a batch separately; set it to null"
    if run_.data.split.num_micro_batches > run_.data.split.num_replicas:
        return (
            f"a step of train.global_batch_size={config.train.global_batch_size} has "
            f"{run_.data.split.accumulation} micro-batches on each rank, and gather would combine only "
            "one per rank; set train.micro_batch_size=null, and a smaller global batch if memory is short"
        )
    if run_.strategy.num_replicas < run_.ranks.world_size:
        return f"strategy={config.strategy.name} has ranks without samples; use ddp or fsdp"
    return None
