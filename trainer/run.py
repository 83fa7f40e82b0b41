"""The story of a run, from settings to result.json."""

import dataclasses
import json
import logging
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainer import fingerprint
from trainer.build import build
from trainer.checkpoint import Agreement, Checkpointer, saved_seed, weights_for
from trainer.config import Config, KeepBest, TrainConfig, flatten, to_yaml
from trainer.data.batch import BatchSplit, split_batch
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.deferred import Deferred, deferred
from trainer.distributed import Dist, compare_across_ranks, on_main, process_group
from trainer.errors import EndedBefore, UserError, writing
from trainer.faults import failure
from trainer.faults.rehearsal import Rehearsal
from trainer.launch.fresh import is_watched
from trainer.launch.place import place
from trainer.loggers import RunLog, messages, table
from trainer.loop import Job, fit
from trainer.optim import check_optimizer, check_schedule
from trainer.replicas import ReplicaGuard
from trainer.run_dir import claim
from trainer.seeding import seed_everything
from trainer.signals import StopRequest
from trainer.state import Progress, TrainState
from trainer.strategies import Strategy, build_strategy
from trainer.strategies.base import parameter_count
from trainer.tasks import Task

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Train as `config` says and return what result.json holds.

    Raises:
        UserError: a setting that does not fit this machine, this data or the other ranks.
    """
    with (
        StopRequest(is_watched(place(config.distributed))) as stop_request,
        process_group(config.distributed) as dist,
        ExitStack() as held,
    ):
        shared = {name: value for name, value in flatten(config).items() if name != "distributed.rank"}
        compare_across_ranks(shared, dist)
        assert dist.watch is not None
        attempt = dist.watch.attempt
        if ended := on_main(lambda: failure.last_word(config.run_dir, attempt), dist):
            raise EndedBefore(ended["status"], ended["message"])
        run_id, chosen = on_main(lambda: _settle(config, held), dist)
        config = dataclasses.replace(config, **chosen)
        run_dir = Path(chosen["run_dir"])
        dist.watch.writes_to(run_dir)
        with messages(dist, run_dir):
            job = assemble(config, run_id, dist, stop_request)
            figures = fit(job)
            job.run_log.figures(job.strategy.figures, job.state.progress.step, at_end=True)
            result = {
                "strategy": config.strategy.name,
                "comm": config.comm.algorithm,
                "world_size": dist.world_size,
                **figures,
                "param_sha256": fingerprint.parameters_sha256(job.state.model),
            }
            job.checkpointer.close()
            if summary := job.strategy.summary():
                log.info("%s", summary)
            job.strategy.close()
            job.run_log.close()
            if dist.is_main and job.first_step < job.total_steps:  # else what the run left before stands
                with writing(run_dir):
                    (run_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
            log.info("%s  ->  tensorboard --logdir %s", run_dir, run_dir / "tensorboard")
    return result


def assemble(config: Config, run_id: str, dist: Dist, stop_request: StopRequest) -> Job:
    """Put the parts of a run together, up to the step at which it begins or goes on (a collective).

    `config.run_dir`, `config.seed` and `run_id` are those of this run, chosen, and the same on every rank.
    """
    assert config.run_dir is not None and config.seed is not None
    run_dir, seed, train = Path(config.run_dir), config.seed, config.train
    rehearsal = Rehearsal(config.fault, dist.rank, dist.hosts, run_dir)
    dist = dataclasses.replace(dist, heartbeat=rehearsal.heartbeat(dist.heartbeat))
    strategy = build_strategy(config, dist)
    batch = split_batch(train.global_batch_size, train.micro_batch_size, strategy.num_replicas)

    task = _build_task(config)
    _check_keep_best(config.checkpoint.keep_best, task)
    train_set, train_loader, eval_loader = _load_data(config, batch, strategy, dist)
    checkpointer = Checkpointer(
        config.checkpoint,
        run_dir,
        dist,
        run_id=run_id,
        num_samples=train_loader.num_samples,
        strategy=config.strategy.name,
        config=flatten(config),
    )
    source = checkpointer.find(config.resume)
    begin = source.progress if source else Progress()
    total_steps = _last_step(begin, train, train_loader.num_samples)

    model = deferred(lambda: _build_model(config.model, train_set), seed)
    _start_from(config.model, model, Agreement(dist, config.checkpoint.timeout_s))
    compare_across_ranks(fingerprint.inputs(model.module, train_loader, eval_loader), dist)
    num_parameters = parameter_count(model.module.parameters())
    wrapped = strategy.wrap(model.module, model.fill)
    strategy.notes += model.notes
    del model  # and with it the weights that it was to start from
    seed_everything(seed, strategy.replica)  # each rank drops out units of its own

    optimizer = build("optim", config.optim, wrapped.parameters())
    check_optimizer(optimizer, strategy.unwrap(wrapped))
    facts = ScheduleFacts(total_steps, train_loader.steps_per_epoch)
    schedule = build("schedule", config.schedule, optimizer, facts=facts)
    check_schedule(schedule, evaluates=eval_loader is not None)
    state = TrainState(strategy.unwrap(wrapped), optimizer, schedule, strategy.grad_scaler(), Progress())
    if source is not None:
        checkpointer.restore(state, source)
        state.progress.settle(train.global_batch_size, train_loader.num_samples)
    rehearsal.meet(state, total_steps, replicated=bool(strategy.equal_ranks()))

    job = Job(
        dist=dist,
        strategy=strategy,
        task=task,
        model=wrapped,
        state=state,
        train_loader=train_loader,
        eval_loader=eval_loader,
        settings=train,
        batch=batch,
        first_step=state.progress.step,
        total_steps=total_steps,
        checkpointer=checkpointer,
        replicas=ReplicaGuard(dist, strategy.equal_ranks(), train.check_replicas_every),
        run_log=RunLog(dist, run_dir, total_steps, state.progress.step),
        stop_request=stop_request,
    )
    _introduce(config, job, num_parameters)
    return job


def _load_data(
    config: Config, batch: BatchSplit, strategy: Strategy, dist: Dist
) -> tuple[Any, TrainLoader, EvalLoader | None]:
    """The training data, and the loaders of this process's share of both kinds."""
    share: dict[str, Any] = {
        "replica": strategy.replica,
        "seed": config.seed,
        "device": dist.device,
        "timeout_s": config.distributed.timeout_s,
        "heartbeat": dist.heartbeat,
    }
    train_set = build("data.dataset", config.data.dataset, split="train")
    train_loader = TrainLoader(train_set, config.data, batch, **share)
    if not config.train.eval_every_epochs:
        return train_set, train_loader, None
    eval_set = build("data.dataset", config.data.dataset, split="eval")
    return train_set, train_loader, EvalLoader(eval_set, config.data, batch, **share)


def _last_step(begin: Progress, train: TrainConfig, num_samples: int) -> int:
    """The number of the run's last step; `begin` may stem from a run with another batch size."""
    begin = dataclasses.replace(begin)
    begin.settle(train.global_batch_size, num_samples)
    full_epochs = begin.step + begin.steps_to_go(train.epochs, train.global_batch_size, num_samples)
    return min(train.max_steps or full_epochs, full_epochs)


def _introduce(config: Config, job: Job, num_parameters: int) -> None:
    job.run_log.text("config", f"```yaml\n{to_yaml(config)}\n```")
    log.info("%s", start_table(config, job, num_parameters))
    for note in job.strategy.notes:
        log.info("%s", note)


def start_table(config: Config, job: Job, num_parameters: int) -> str:
    dist, train_loader, held_out = job.dist, job.train_loader, job.eval_loader
    steps_per_epoch = train_loader.steps_per_epoch
    processes = f"{dist.num_hosts} x {dist.local_world_size} processes"
    return table(
        {
            "strategy": f"{config.strategy.name}, comm {config.comm.algorithm}",
            "hosts": f"{processes} on {dist.device.type}, {dist.backend}",
            "precision": config.train.precision + (", compiled" if config.train.compile else ""),
            "model": f"{config.model['_target_']}, {num_parameters:,} parameters",
            "data": f"{config.data.dataset['_target_']}, {train_loader.num_samples:,} samples"
            + (f", {held_out.num_samples:,} held out" if held_out else ""),
            "batch": str(job.batch),
            "steps": f"{job.total_steps:,}, {steps_per_epoch:,} an epoch, from {job.first_step:,}",
            "seed": str(config.seed),
            "run": str(config.run_dir),
        }
    )


@dataclass(frozen=True)
class ScheduleFacts:
    """What `auto` can stand for in a schedule's settings."""

    total_steps: int
    steps_per_epoch: int


def _build_model(node: dict[str, Any], train_set: Any) -> nn.Module:
    """Build the model; `auto` settings come from the training data, and `init_from` is ours to load."""
    settings = {key: value for key, value in node.items() if key not in ("init_from", "init_ignore")}
    for name, things in (("num_classes", "classes"), ("vocab_size", "tokens")):
        given, there = node.get(name), getattr(train_set, name, None)
        if isinstance(given, int) and isinstance(there, int) and given < there:
            raise UserError(
                f"model.{name} is {given}, but the data has {there} {things}: its largest label is "
                f"{there - 1}; set model.{name}={there}, or auto"
            )
    model = build("model", settings, facts=train_set)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model: {node['_target_']} makes a {type(model).__name__}, which is no torch.nn.Module"
        )
    parameters = dict(model.named_parameters())
    if lazy := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise UserError(
            f"model: {node['_target_']} leaves the shape of {', '.join(lazy)} to its first batch; ranks and "
            "optimizer need it before: name the sizes, as in torch.nn.Linear for LazyLinear"
        )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"model: {node['_target_']} has nothing to train: none of its {len(parameters)} parameters "
            "requires a gradient"
        )
    return model


def _build_task(config: Config) -> Task:
    task: Task = build("data.task", config.data.task)
    needed = ("loss", "num_samples") + (("eval_sums", "summarise") if config.train.eval_every_epochs else ())
    if lacking := [name for name in needed if not callable(getattr(task, name, None))]:
        raise UserError(
            f"data.task: {config.data.task['_target_']} makes a {type(task).__name__} without "
            f"{', '.join(lacking)}; a task has the methods of trainer.tasks.Task"
        )
    return task


def _start_from(node: dict[str, Any], model: Deferred, agreement: Agreement) -> None:
    source, ignore = node.get("init_from"), node.get("init_ignore") or ()
    if source is not None:  # a file that one host does not see ends all ranks, in one message
        model.load(agreement.everywhere(lambda: weights_for(model.module, source, ignore)))


def _check_keep_best(best: KeepBest | None, task: Task) -> None:
    """Refuse a metric that no evaluation will yield, where the task says which figures it gives."""
    figures = [f"eval/{name}" for name in getattr(task, "figures", ())]
    if best is not None and figures and best.metric not in figures:
        raise UserError(
            f"checkpoint.keep_best.metric is {best.metric}, but must be one that evaluation yields: "
            f"{', '.join(figures)}"
        )


def _settle(config: Config, held: ExitStack) -> tuple[str, dict[str, Any]]:
    """The run's id; and the run directory, its own until `held` closes, and the seed, if these are open."""
    run_dir = claim(config.run_dir, config.resume, held, wait_s=config.distributed.timeout_s / 2)
    seed = config.seed
    if seed is None and config.resume is not None:
        seed = saved_seed(run_dir.path, run_dir.run_id, config.resume)
    chosen: dict[str, Any] = {
        "run_dir": str(run_dir.path),
        "seed": secrets.randbits(31) if seed is None else seed,
    }
    failure.forget(run_dir.path)
    with writing(run_dir.path):
        (run_dir.path / "config.yaml").write_text(to_yaml(dataclasses.replace(config, **chosen)))
    return run_dir.run_id, chosen
