"""Build the parts of a run, and restore their state from a checkpoint."""

from collections.abc import Collection
from pathlib import Path

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.build.data import LoadedData, as_built, build_to_device, load_data, split_for
from trainer.build.model import initial_model, wrap_model
from trainer.build.task import build_task
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.restoring import frozen_digests
from trainer.comm.shared_memory import rows_of_host
from trainer.config import Config, flatten
from trainer.context import Guards, Run, RunData, RunPlan, RunReport
from trainer.data.device import ToDevice
from trainer.data.loading.batch import BatchSplit
from trainer.distributed.agreement import Agreement, compare_across_ranks
from trainer.distributed.ranks import Ranks
from trainer.dry_run.evaluation import check_metrics_of_task
from trainer.errors import UserError
from trainer.exact.environment import exact_facts
from trainer.failures.save_on_failure import SaveOnFailure
from trainer.guards.buffers import BufferCheck
from trainer.guards.failure_snapshot import build_snapshot
from trainer.guards.replicas import ReplicaCheck
from trainer.guards.unsaved import UnsavedState
from trainer.guards.verification import GradientVerification, Verification
from trainer.launch.signals import StopRequest
from trainer.loggers import RunLog
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.param_groups import build_optimizer
from trainer.optim.schedules import ScheduleFacts, build_schedule, check_schedule, settings_of
from trainer.optim.whole_tensors import whole_parts
from trainer.report import run_hash
from trainer.report.meter import Meter
from trainer.report.mfu import ModelFlops, model_flops
from trainer.report.profiler import Profile
from trainer.report.weight_statistics import WeightStatistics
from trainer.state.early_end import EarlyEnd
from trainer.state.progress import planned_steps
from trainer.state.train_state import Progress, TrainState
from trainer.step_vote import StepVote
from trainer.strategies.base import Strategy, grad_scaler, parameter_count
from trainer.strategies.build import build_strategy
from trainer.strategies.placement import devices_of
from trainer.tasks import Task
from trainer.tasks.label_counts import count_labels
from trainer.tensors.generators import seed_everything


def assemble(
    config: Config,
    run_id: str,
    ranks: Ranks,
    stop_request: StopRequest,
    failure_save: SaveOnFailure | None = None,
) -> Run:
    """Build the parts of a run, ready for its next step (a collective).

    Args:
        config: `run_dir` and `seed` must be set, to the same values on every rank.
        failure_save: saves this process's state if another process fails; None disables this.
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
    trained_before = checkpoint.trained if checkpoint else ()
    state = _state(config, strategy, wrapped, total_steps, data.train_loader.steps_per_epoch, trained_before)
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
    run_log = RunLog(ranks, config, run_id, total_steps, step)
    to_device = build_to_device(config, strategy.device, data.train_set)
    return Run(
        config=as_built(config, data.train_set),
        ranks=ranks,
        strategy=strategy,
        task=task,
        model=wrapped,
        state=state,
        data=RunData(*loaders, split, first, to_device),
        plan=RunPlan(step, total_steps, num_parameters, exact, train.log_interval(total_steps)),
        checkpointer=checkpointer,
        vote=StepVote(ranks, strategy.order, rows_of_host(ranks, timeout_s)),
        guards=Guards(
            replicas=ReplicaCheck(
                ranks,
                strategy.replica_groups(),
                train.check_replicas_every,
                strategy.replicated,
                run_log.weights_hash,
            ),
            unsaved=UnsavedState(state.model, task, state.optimizer, strategy.replica == 0),
            buffers=BufferCheck(state.model, ranks, strategy.order.by_chunks),
            snapshot=snapshot,
            kept_buffers=kept_buffers,
            verification=_verification(
                config, ranks, strategy, task, wrapped, split, to_device, checkpointer
            ),
        ),
        report=RunReport(
            run_log=run_log,
            meter=Meter(ranks, flops, strategy.order, strategy.num_replicas, run_log.steps),
            profile=Profile(train.profile, run_dir, ranks, step, total_steps),
            weight_statistics=WeightStatistics(state.model, ranks, train.histograms_every),
        ),
        stop_request=stop_request,
    )


def _verification(
    config: Config,
    ranks: Ranks,
    strategy: Strategy,
    task: Task,
    wrapped: nn.Module,
    split: BatchSplit,
    to_device: ToDevice,
    checkpointer: Checkpointer,
) -> Verification:
    train = config.train
    if train.verify_every is None:
        return Verification()
    assert config.seed is not None
    verification = GradientVerification(
        train.verify_every,
        ranks,
        strategy,
        task,
        wrapped,
        [train.own_chunks(strategy.num_replicas, rank) for rank in range(strategy.num_replicas)],
        to_device,
        lambda batch: count_labels(task, batch, split),
        config.seed,
        config.distributed.timeout_s,
        checkpointer.restored_verified,
        checkpointer.set_aside,
    )
    checkpointer.verified_step = lambda: verification.verified_step
    return verification


def _model(
    config: Config,
    data: LoadedData,
    task: Task,
    split: BatchSplit,
    strategy: Strategy,
    ranks: Ranks,
    checkpoint: OpenCheckpoint | None,
) -> tuple[nn.Module, int, ModelFlops | None, dict[str, str]]:
    """Return the wrapped model, the number of its parameters, its FLOP counter and its `frozen_digests`.

    The digests are empty unless the checkpoint to resume from, or the checkpoints to be saved, lack frozen
    parameters.
    """
    assert config.seed is not None
    omits_frozen = not config.checkpoint.frozen or (checkpoint is not None and bool(checkpoint.left_out))
    needs_initial = checkpoint is None or omits_frozen  # a complete checkpoint replaces all initial weights
    agreement = Agreement(ranks)
    read_by = (agreement, ranks.local_rank) if needs_initial else None
    model = initial_model(config, data.train_set, ranks if strategy.fills_by_unit else None, read_by)
    compare_across_ranks(run_hash.inputs(model.module, data.train_loader, data.eval_loader), ranks)
    num_parameters = parameter_count(model.module.parameters())
    frozen = agreement.on_main(lambda: frozen_digests(model.module, model.loaded)) if omits_frozen else {}
    if not config.checkpoint.frozen and not frozen:
        raise UserError(
            "checkpoint.frozen=false excludes from checkpoints the frozen parameters that model.init_from "
            "loads, but this model has none; set checkpoint.frozen=true, or set model.init_from and "
            "model.freeze"
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
    trained_before: Collection[str],
) -> TrainState:
    """Return the initial state; `trained_before` names the parameters that were trained before a resume."""
    fused_on_cpu = config.train.exact is None and config.train.precision != "fp16"
    facts = ScheduleFacts(total_steps, steps_per_epoch)
    schedule_options = facts.in_steps(config.schedule)

    def build(trainable: TrainableParameters) -> tuple[Optimizer, LRScheduler]:
        optimizer = build_optimizer(trainable, config.optim, fused_on_cpu)
        schedule = build_schedule(schedule_options, optimizer, facts)
        check_schedule(schedule, evaluates=config.train.evaluates)
        strategy.order.check(optimizer, strategy.gradients_differ)
        return optimizer, schedule

    trainable = TrainableParameters(strategy.unwrap(wrapped), trained_before)
    optimizer, schedule = build(trainable)
    strategy.notes += [
        f"fsdp: {type(part.optimizer).__name__} needs whole tensors, so one rank gathers and updates each "
        "tensor; this is slower than updating shards"
        for part in whole_parts(optimizer)
    ]
    early_end = EarlyEnd(config.train.early_stopping, config.train.max_hours)
    state = TrainState(
        trainable,
        optimizer,
        schedule,
        grad_scaler(strategy),
        Progress(),
        settings_of(schedule_options, facts),
        early_end=early_end,
        build=build,
    )
    if config.ema.decay is not None:
        state.keep_average(config.ema.decay, config.ema.warmup)
    return state
