"""The story of a run, from settings to result.json."""

import dataclasses
import gc
import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.build import (
    LoadedData,
    as_built,
    build_task,
    build_to_device,
    initial_model,
    load_data,
    split_for,
    wrap_model,
)
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.finding import saved_settings_of
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.restoring import frozen_digests
from trainer.checks.buffers import BufferCheck
from trainer.checks.replicas import ReplicaCheck
from trainer.checks.unsaved import UnsavedState
from trainer.comm.shared_memory import rows_of_host
from trainer.config import Config, TrainConfig, flatten, to_yaml
from trainer.data.loading.batch import BatchSplit, split_batch
from trainer.distributed.agreement import Agreement, compare_across_ranks, on_main
from trainer.distributed.gather_samples import gathering
from trainer.distributed.process_group import watched_process_group
from trainer.distributed.ranks import Ranks
from trainer.distributed.shrink import Shrunk
from trainer.errors import UserError, writing
from trainer.exact.environment import exact_facts
from trainer.faults.fault_save import FaultSave
from trainer.files import failure
from trainer.files.writing import atomic_file
from trainer.launch.fresh import is_watched
from trainer.launch.place import Place, place, publish
from trainer.launch.signals import StopRequest
from trainer.loggers import RunLog
from trainer.loop import fit
from trainer.optim.param_groups import build_optimizer
from trainer.optim.progress import EarlyEnd, planned_steps
from trainer.optim.schedules import ScheduleFacts, build_schedule, check_schedule, settings_of
from trainer.optim.train_state import Progress, TrainState
from trainer.optim.trained import Trained
from trainer.optim.whole_tensors import whole_parts
from trainer.run_dir.claim import RunDir, claim
from trainer.run_dir.console import messages
from trainer.run_dir.metrics_file import write_result
from trainer.strategies.base import Strategy, grad_scaler, parameter_count
from trainer.strategies.build import build_strategy
from trainer.strategies.placement import devices_of
from trainer.tasks import Task
from trainer.tensors.generators import seed_everything
from trainer.training import run_hash
from trainer.training.context import Guards, Run, RunData, RunPlan, RunReport
from trainer.training.evaluation_dry_run import check_metrics_of_task
from trainer.training.failure_snapshot import build_snapshot
from trainer.training.meter import Meter
from trainer.training.mfu import ModelFlops, model_flops
from trainer.training.micro_batch import with_micro_batch_size
from trainer.training.profiler import Profile
from trainer.training.start_table import start_table
from trainer.training.step_agreement import StepAgreement
from trainer.training.weight_statistics import WeightStatistics
from trainer.troubleshooting import causes_named

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Train as `config` says and return the contents of result.json.

    Raises:
        UserError: a setting does not fit this machine, this data or the other ranks.
    """
    here: Place | None = None
    with StopRequest(is_watched(place(config.distributed))) as stop_request:
        while True:
            begun: list[Run] = []
            try:
                return _run(config, here, stop_request, begun)
            except Shrunk as shrunk:
                here, run_dir = shrunk.place, str(shrunk.run_dir)
                shrunk.__context__ = None  # it would keep the run alive
            while begun:
                _close(begun.pop())
            gc.collect()  # among others DataLoaders, which then end their workers
            publish(here)
            config = dataclasses.replace(config, run_dir=run_dir, resume="auto")


def _close(run_: Run) -> None:
    for end in (run_.report.profile.close, run_.strategy.close, run_.report.run_log.close):
        with suppress(Exception):  # of what other ranks, or the disk, have broken
            end()


def _run(config: Config, here: Place | None, stop_request: StopRequest, begun: list[Run]) -> dict[str, Any]:
    """`run`, to the end or until some of the ranks are gone; its `Run`, once it is built, is in `begun`.

    Args:
        here: the place of this process, if others are gone already.
    """
    check_shares = _check_shares(config.train)
    with (
        watched_process_group(config.distributed, lambda: stop_request.is_set, here, check_shares) as joined,
        ExitStack() as resources,
    ):
        ranks, watch = joined
        shared = {name: value for name, value in flatten(config).items() if name != "distributed.rank"}
        compare_across_ranks(shared, ranks)
        claimed, seed, previous_size = on_main(lambda: _claim(config, resources), ranks)
        run_dir = claimed.path
        config = dataclasses.replace(config, run_dir=str(run_dir), seed=seed)
        watch.ending.writes_to(run_dir, refusals=not claimed.used)
        with messages(ranks, run_dir) as open_log:
            config = with_micro_batch_size(config, previous_size, ranks)
            take_over = partial(_take_over, config, run_dir, open_log)
            if not claimed.used:
                on_main(take_over, ranks)
            run_ = assemble(config, claimed.run_id, ranks, stop_request, watch.ending.save)
            begun.append(run_)
            if claimed.used:  # a refusal before this line leaves the previous run unchanged
                on_main(take_over, ranks)
                watch.ending.writes_to(run_dir)
            on_main(partial(_write_settings, run_.config, run_dir), ranks)
            run_.report.run_log.open()
            resources.callback(run_.report.run_log.progress.close)
            _log_start(config, run_)
            with causes_named(config.train), gathering(_why_no_gather(config, run_)):
                metrics = fit(run_)
            run_.report.run_log.plots(run_.strategy.report.plots, run_.state.progress.step, at_end=True)
            result = _result(config, run_, metrics)
            run_.checkpointer.saving.done()
            if summary := run_.strategy.report.summary():
                log.info("%s", summary)
            run_.agreement.close()
            run_.strategy.close()
            if ranks.is_main:
                write_result(run_dir, result, made_steps=run_.state.progress.step > run_.plan.steps_before)
            run_.report.run_log.close()  # last, so that a failing logger loses nothing else
            run_.checkpointer.finish_remote()
            log.info("%s  ->  %s", run_dir, run_.report.run_log.look)
    return result


def _check_shares(train: TrainConfig) -> Callable[[int], object]:
    """Return what raises UserError if a global batch can't be divided among a number of ranks."""
    if train.exact is not None:  # chunks are divided among any number of ranks
        return lambda num_ranks: None
    return partial(split_batch, train.global_batch_size, train.known_micro_batch_size)


def _result(config: Config, run_: Run, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The contents of result.json (a collective)."""
    strategy, ended_by = run_.strategy, run_.state.early_end.setting
    return {
        "strategy": config.strategy.name,
        "comm": run_.strategy.algorithm,
        "world_size": run_.ranks.world_size,
        **{name: None if math.isnan(value) else value for name, value in metrics.items()},
        **strategy.report.measured(),
        **({"exact": run_.plan.exact} if run_.plan.exact else {}),
        **({"ended_by": ended_by} if ended_by else {}),
        "param_sha256": run_hash.parameters_sha256(run_.state.model),
    }


def assemble(
    config: Config,
    run_id: str,
    ranks: Ranks,
    stop_request: StopRequest,
    failure_save: FaultSave | None = None,
) -> Run:
    """Build the parts of a run, up to the step at which it begins or resumes (a collective).

    `config.run_dir`, `config.seed` and `run_id` must be this run's, and the same on every rank.
    `failure_save` saves this process's state if others fail; None: nothing does.
    """
    assert config.run_dir is not None and config.seed is not None
    run_dir, train = Path(config.run_dir), config.train
    strategy = build_strategy(config, ranks)
    split = split_for(train, strategy)
    task = build_task(config)
    check_metrics_of_task(config, task)
    data = load_data(config, split, strategy, ranks)
    num_samples = data.train_loader.num_samples

    checkpointer = Checkpointer(config.checkpoint, run_dir, ranks, run_id, num_samples, flatten(config))
    checkpoint = checkpointer.open(config.resume)
    progress = checkpoint.progress if checkpoint else Progress()
    total_steps = planned_steps(progress, train, num_samples)

    wrapped, num_parameters, flops, frozen = _model(config, data, task, split, strategy, ranks, checkpoint)
    earlier = checkpoint.trained if checkpoint else ()
    state = _state(config, strategy, wrapped, total_steps, data.train_loader.steps_per_epoch, earlier)
    saved = checkpoint.facts.get("exact") if checkpoint else None
    exact = exact_facts(train.exact, ranks, saved, progress.step)
    data_states = checkpointer.bind(state, exact, frozen)
    if checkpoint is not None:
        data.train_loader.resume(data_states)
        if num_samples is not None:
            state.progress.skip_short_rest(train.global_batch_size, num_samples)

    kept_buffers, snapshot = build_snapshot(
        config, state, checkpointer, data.train_loader, strategy, ranks, failure_save
    )
    loaders, first = (data.train_loader, data.eval_loader), split.first_micro_batch(strategy.replica)
    step, timeout_s = state.progress.step, config.distributed.timeout_s
    return Run(
        config=as_built(config, data.train_set),
        ranks=ranks,
        strategy=strategy,
        task=task,
        model=wrapped,
        state=state,
        data=RunData(*loaders, split, first, build_to_device(config, strategy.device, data.train_set)),
        plan=RunPlan(step, total_steps, num_parameters, exact),
        checkpointer=checkpointer,
        agreement=StepAgreement(ranks, strategy.order, rows_of_host(ranks, timeout_s)),
        guards=Guards(
            replicas=ReplicaCheck(
                ranks, strategy.replica_groups(), train.check_replicas_every, strategy.replicated
            ),
            unsaved=UnsavedState(state.model, task, state.optimizer, strategy.replica == 0),
            buffers=BufferCheck(state.model, ranks, strategy.order.by_leaves),
            snapshot=snapshot,
            kept_buffers=kept_buffers,
        ),
        report=RunReport(
            run_log=RunLog(ranks, config, run_id, total_steps, step),
            meter=Meter(ranks, flops, strategy.order, strategy.num_replicas),
            profile=Profile(train.profile, run_dir, ranks, step, total_steps),
            weight_statistics=WeightStatistics(state.model, ranks, train.histograms_every),
        ),
        stop_request=stop_request,
    )


def _model(
    config: Config,
    data: LoadedData,
    task: Task,
    split: BatchSplit,
    strategy: Strategy,
    ranks: Ranks,
    checkpoint: OpenCheckpoint | None,
) -> tuple[nn.Module, int, ModelFlops | None, dict[str, str]]:
    """The model, wrapped; the number of its parameters; what counts its FLOPs; and its `frozen_digests`.

    They are needed if the checkpoint to read or to save leaves out frozen parameters.
    """
    assert config.seed is not None
    leaves_out = not config.checkpoint.frozen or (checkpoint is not None and bool(checkpoint.left_out))
    needs_initial = checkpoint is None or leaves_out  # a whole checkpoint replaces all initial weights
    agreement = Agreement(ranks)
    read_by = (agreement, ranks.local_rank) if needs_initial else None
    model = initial_model(config, data.train_set, ranks if strategy.fills_by_unit else None, read_by)
    compare_across_ranks(run_hash.inputs(model.module, data.train_loader, data.eval_loader), ranks)
    num_parameters = parameter_count(model.module.parameters())
    frozen = agreement.on_main(lambda: frozen_digests(model.module, model.loaded)) if leaves_out else {}
    if not config.checkpoint.frozen and not frozen:
        raise UserError(
            "checkpoint.frozen=false leaves out frozen parameters that came from model.init_from, and this "
            "model has none: set checkpoint.frozen=true, or model.init_from and model.freeze"
        )
    devices = max(strategy.devices, devices_of(model.module), key=len)
    flops = model_flops(model.module, task, config.train, split, devices, ranks)
    wrapped = wrap_model(config, model, strategy)
    strategy.share_buffers(wrapped)
    seed_everything(config.seed, strategy.replica)
    return wrapped, num_parameters, flops, frozen


def _state(
    config: Config,
    strategy: Strategy,
    wrapped: nn.Module,
    total_steps: int,
    steps_per_epoch: int | None,
    earlier: Collection[str],
) -> TrainState:
    """The state that training changes, before the first step.

    Args:
        earlier: names of parameters that the run trained before this resume.
    """
    fused_on_cpu = config.train.exact is None and config.train.precision != "fp16"
    facts = ScheduleFacts(total_steps, steps_per_epoch)
    of_schedule = facts.in_steps(config.schedule)

    def build(trained: Trained) -> tuple[Optimizer, LRScheduler]:
        optimizer = build_optimizer(trained, config.optim, fused_on_cpu)
        schedule = build_schedule(of_schedule, optimizer, facts)
        check_schedule(schedule, evaluates=config.train.evaluates)
        strategy.order.check(optimizer, strategy.gradients_differ)
        return optimizer, schedule

    trained = Trained(strategy.unwrap(wrapped), earlier)
    optimizer, schedule = build(trained)
    strategy.notes += [
        f"fsdp: {type(part.optimizer).__name__} needs whole tensors: one rank gathers and updates each "
        "tensor, which is slower than updating shards"
        for part in whole_parts(optimizer)
    ]
    early_end = EarlyEnd(config.train.stop, config.train.max_hours)
    state = TrainState(
        trained,
        optimizer,
        schedule,
        grad_scaler(strategy),
        Progress(),
        settings_of(of_schedule, facts),
        early_end=early_end,
        build=build,
    )
    if config.ema.decay is not None:
        state.keep_average(config.ema.decay, config.ema.warmup)
    return state


def _log_start(config: Config, run_: Run) -> None:
    if run_.ranks.is_main:  # writing all settings takes longer than a step of a small model
        run_.report.run_log.texts({"config": f"```yaml\n{to_yaml(config)}\n```"}, run_.plan.steps_before)
    log.info("%s", start_table(config, run_))
    for note in run_.strategy.notes:
        log.info("%s", note)


def _why_no_gather(config: Config, run_: Run) -> str | None:
    """Why no loss can be over the outputs of all ranks, in words."""
    if config.train.exact is not None:
        return f"train.exact={config.train.exact} computes each part of a batch alone; set it to null"
    if run_.data.split.num_micro_batches > run_.data.split.num_replicas:
        return (
            f"a step of train.global_batch_size={config.train.global_batch_size} has "
            f"{run_.data.split.accumulation} micro-batches on each rank, each of which would be compared "
            "with a part of the batch alone; set train.micro_batch_size=null, and a smaller global batch if "
            "memory is short"
        )
    if run_.strategy.num_replicas < run_.ranks.world_size:
        return f"strategy={config.strategy.name} has ranks without samples; use ddp or fsdp"
    return None


def _claim(config: Config, resources: ExitStack) -> tuple[RunDir, int, int | None]:
    """The run directory, locked until `resources` closes; the seed; a resumed run's micro-batch size."""
    remote = config.checkpoint.remote
    run_dir = claim(config.run_dir, config.resume, resources, config.distributed.timeout_s / 2, remote)
    saved: Mapping[str, Any] = {}
    if config.resume is not None and (config.seed is None or config.train.micro_batch_size == "auto"):
        saved = saved_settings_of(run_dir.path, run_dir.run_id, config.resume, remote)
    seed = saved.get("seed") if config.seed is None else config.seed
    return run_dir, secrets.randbits(31) if seed is None else seed, saved.get("train.micro_batch_size")


def _take_over(config: Config, run_dir: Path, open_log: Callable[[], None]) -> None:
    """Called on rank 0: from now on the files of the run directory are this run's."""
    failure.forget(run_dir)
    _write_settings(config, run_dir)
    open_log()


def _write_settings(config: Config, run_dir: Path) -> None:
    with writing(run_dir), atomic_file(run_dir / "config.yaml") as file:
        file.write(to_yaml(config).encode())
