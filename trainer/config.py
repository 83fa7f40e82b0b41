"""The schema of every setting the trainer owns, and all validation.

`load` is the only door: it turns what Hydra composed into one typed `Config`, or raises a `UserError`.
Models, datasets, tasks, optimizers and schedules are `_target_` nodes: their keys belong to the class
they name, which validates them itself. Defaults live in conf/, this file holds types and limits, each
limit beside its field; what two settings say against each other stands in `_check_contradictions`.
Imports no torch, so that a mistake is reported before torch has loaded.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from trainer.errors import UserError
from trainer.overrides import leaves, not_a_setting


@dataclass(frozen=True)
class Limit:
    """What a value must keep to, unless it is None: that means absent."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, name: str, value: Any) -> None:
        if value is not None and not self.holds(value):
            raise UserError(f"{name} is {value if value != '' else 'empty'}, but must be {self.words}")


def _limited(holds: Callable[[Any], bool], words: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"limit": Limit(holds, words)})


def at_least(limit: float) -> Any:
    return _limited(lambda value: value >= limit, f"at least {limit}")


def above(limit: float) -> Any:
    return _limited(lambda value: value > limit, f"greater than {limit}")


def one_of(*values: str, default: str = MISSING) -> Any:
    return _limited(lambda value: value in values, f"one of {', '.join(values)}", default)


def like(pattern: str, words: str) -> Any:
    return _limited(lambda value: re.fullmatch(pattern, value) is not None, words)


def _seconds() -> Any:
    """A deadline; torch and the C library count it in nanoseconds, in 64 bits."""
    return _limited(lambda value: 0 < value <= 1e9, "greater than 0, and at most 1e9 (30 years)")


_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class TrainConfig:
    epochs: int = at_least(1)
    max_steps: int | None = at_least(1)
    global_batch_size: int = at_least(1)
    micro_batch_size: int | None = at_least(1)
    precision: str = one_of(*_PRECISIONS)
    compile: bool = MISSING
    channels_last: bool = MISSING
    clip_grad_norm: float | None = above(0)
    log_every_steps: int = at_least(1)
    eval_every_epochs: int = at_least(0)
    check_replicas_every: int | None = at_least(1)


@dataclass
class DataConfig:
    dataset: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    download: bool = MISSING
    on_bad_sample: str = one_of("raise", "skip")
    num_workers: int = at_least(0)
    prefetch_factor: int = at_least(1)
    pin_memory: bool | None = MISSING
    persistent_workers: bool = MISSING


@dataclass
class DistributedConfig:
    device: str = one_of("auto", "cpu", "cuda")
    backend: str | None = one_of("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl")
    timeout_s: float = _seconds()
    init_method: str = like(
        r"env://|tcp://(\[[0-9a-fA-F:.]+\]|[^/:]+):\d+|file:///.+", "env://, tcp://HOST:PORT or file:///PATH"
    )
    rank: int | None = at_least(0)
    world_size: int | None = at_least(1)


@dataclass
class CommConfig:
    """How DDP all-reduces its gradients; ignored by no strategy: the others refuse all but `native`."""

    algorithm: str = MISSING


@dataclass
class NativeCommConfig(CommConfig):
    wire_dtype: str = one_of(*_PRECISIONS)
    timeline: bool = MISSING


@dataclass
class ScheduleCommConfig(CommConfig):
    wire_dtype: str = one_of(*_PRECISIONS)
    segment_mb: float = _limited(lambda value: 0.01 <= value <= 1e6, "at least 0.01, and at most 1e6 (1 TB)")


@dataclass
class PowerSgdCommConfig(CommConfig):
    matrix_approximation_rank: int = at_least(1)
    start_step: int = at_least(2)  # DDP lays out its buckets anew after the first step
    min_compression_rate: float = above(0)
    use_error_feedback: bool = MISSING
    warm_start: bool = MISSING


@dataclass
class KeepBest:
    metric: str = MISSING
    mode: str = one_of("min", "max", default="min")


@dataclass
class CheckpointConfig:
    format: str = one_of("full", "sharded")
    every_steps: int | None = at_least(1)
    every_epochs: int | None = at_least(1)
    keep_last: int = at_least(1)
    keep_best: KeepBest | None = MISSING
    keep_every: int | None = at_least(1)
    async_: bool = MISSING  # `async` to the person, but a word of Python's own
    timeout_s: float = _seconds()


@dataclass
class StrategyConfig:
    name: str = MISSING


@dataclass
class DdpConfig(StrategyConfig):
    bucket_cap_mb: float = _limited(lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)")
    first_bucket_mb: float = _limited(
        lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)"
    )
    gradient_as_bucket_view: bool = MISSING
    static_graph: bool = MISSING
    find_unused_parameters: bool = MISSING
    sync_batchnorm: bool = MISSING


@dataclass
class FsdpConfig(StrategyConfig):
    shard_group: str = like(r"world|host|0*[1-9][0-9]*", "world, host or a number of ranks")
    unit_min_params: int = at_least(1)
    reshard_after_forward: bool = MISSING
    cpu_offload: bool = MISSING
    activation_checkpointing: bool = MISSING
    param_dtype: str | None = one_of(*_PRECISIONS)
    reduce_dtype: str = one_of(*_PRECISIONS)


FAULT_PHASES = ("data", "forward", "backward", "all_reduce", "optimizer", "checkpoint", "evaluate")


@dataclass
class FaultConfig:
    """A fault made on purpose, once in a run, to see what becomes of it; `none` makes none."""

    kind: str = MISSING


@dataclass
class TimedFaultConfig(FaultConfig):
    """When `phase` is entered for the first time in or after `step`, counted from 1."""

    step: int = at_least(1)
    phase: str = one_of(*FAULT_PHASES)


@dataclass
class RankFaultConfig(TimedFaultConfig):
    rank: int = at_least(0)


@dataclass
class SlowFaultConfig(RankFaultConfig):
    seconds: float = above(0)


@dataclass
class DivergeFaultConfig(RankFaultConfig):
    tensor: str | None = MISSING
    bit: int = at_least(0)


@dataclass
class CutFaultConfig(TimedFaultConfig):
    host: int = at_least(0)
    command: str = MISSING


@dataclass
class LaunchConfig:
    """Where the processes of a run come from."""

    name: str = MISSING


@dataclass
class LocalLaunchConfig(LaunchConfig):
    processes: int | None = at_least(1)
    max_restarts: int = at_least(0)


@dataclass
class SlurmLaunchConfig(LaunchConfig):
    nodes: int = at_least(1)
    processes: int = at_least(1)
    gpus: int | None = at_least(0)
    memory: str | None = MISSING
    partition: str | None = MISSING
    time: str | None = like(r"\d+|(\d+-)?\d+(:\d+){0,2}", "minutes or DAYS-HOURS:MINUTES:SECONDS")
    parameters: dict[str, Any] | None = MISSING
    setup: list[str] = MISSING
    save_before_s: int = at_least(1)
    requeue: bool = MISSING
    wait: bool = MISSING
    dry_run: bool = MISSING


STRATEGIES: dict[str, type[StrategyConfig]] = {
    "single": StrategyConfig,
    "dp": StrategyConfig,
    "ddp": DdpConfig,
    "fsdp": FsdpConfig,
}

COMMS: dict[str, type[CommConfig]] = {
    "native": NativeCommConfig,
    "ring": ScheduleCommConfig,
    "tree": ScheduleCommConfig,
    "halving_doubling": ScheduleCommConfig,
    "hierarchical": ScheduleCommConfig,
    "master_worker": ScheduleCommConfig,
    "powersgd": PowerSgdCommConfig,
}

FAULTS: dict[str, type[FaultConfig]] = {
    "none": FaultConfig,
    **dict.fromkeys(("kill", "stop", "raise", "hang", "nan", "exit"), RankFaultConfig),
    "slow": SlowFaultConfig,
    "diverge": DivergeFaultConfig,
    "cut": CutFaultConfig,
}

LAUNCHES: dict[str, type[LaunchConfig]] = {
    "as_started": LaunchConfig,
    "local": LocalLaunchConfig,
    "slurm": SlurmLaunchConfig,
}


@dataclass
class Config:
    """Everything a run is told. Dicts are `_target_` nodes, lists in them are plain lists."""

    seed: int | None = _limited(lambda value: 0 <= value < 2**64, "from 0 to 2**64 - 1")
    run_dir: str | None = _limited(bool, "a path, or null for a new one under runs/: '.' is this directory")
    resume: str | None = _limited(bool, "auto, the path of a checkpoint, or null")
    model: dict[str, Any] = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    optim: dict[str, Any] = MISSING
    schedule: dict[str, Any] = MISSING
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)

    launch: LaunchConfig = field(default_factory=LaunchConfig)


GROUPS = tuple(a.name for a in dataclasses.fields(Config) if dataclasses.is_dataclass(a.default_factory))


def load(composed: DictConfig) -> Config:
    """Return the typed, resolved and validated settings.

    Raises:
        UserError: an unknown key (also one added with `+`), a wrong type, a value outside its limits, a
            missing value, or two settings that contradict each other.
    """
    try:
        for name in GROUPS:
            if not OmegaConf.is_dict(composed[name]):
                raise UserError(f"{name} is {composed[name]}, but must hold settings, as {name}.NAME=VALUE")
        _name("strategy.name", composed.strategy.name, STRATEGIES)
        _name("comm.algorithm", composed.comm.algorithm, COMMS)
        _name("fault.kind", composed.fault.kind, FAULTS)

        _name("launch.name", composed.launch.name, LAUNCHES)
        schema = OmegaConf.structured(Config)
        schema.launch = OmegaConf.structured(LAUNCHES[composed.launch.name])
        schema.strategy = OmegaConf.structured(STRATEGIES[composed.strategy.name])
        schema.comm = OmegaConf.structured(COMMS[composed.comm.algorithm])
        schema.fault = OmegaConf.structured(FAULTS[composed.fault.kind])
        merged = OmegaConf.merge(schema, _renamed(composed, "async", "async_"))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{missing[0]} has no value; give it one: {missing[0]}=...")
        config = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise UserError(not_a_setting(error.full_key or str(error.key), composed)) from error
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} has no value; give it one: {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{str(error.full_key).rstrip('_')}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    _check_finite(config)
    check_limits(config)
    _check_nodes(config)
    _check_contradictions(config)
    return config


def flatten(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted name, as a person would write it on the command line."""
    return dict(leaves(_as_dict(config)))


def to_yaml(config: Config) -> str:
    """Return the resolved settings as YAML that `--config-dir` can read back."""
    return OmegaConf.to_yaml(OmegaConf.create(_as_dict(config)))


def _as_dict(config: Config) -> dict[str, Any]:
    settings = OmegaConf.create(dataclasses.asdict(config))
    return cast(dict[str, Any], OmegaConf.to_container(_renamed(settings, "async_", "async")))


def _renamed(settings: DictConfig, key: str, new: str) -> DictConfig:
    """A copy of `settings` in which `checkpoint.<key>` is called `new`."""
    settings = copy.deepcopy(settings)
    with open_dict(settings):
        if "checkpoint" in settings and key in settings.checkpoint:
            settings.checkpoint[new] = settings.checkpoint.pop(key)
    return settings


def _name(name: str, value: Any, known: Iterable[str]) -> None:
    if value not in known:
        raise UserError(f"{name} is {value}, but must be one of {', '.join(known)}")


def _check_finite(config: Config) -> None:
    for name, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}, but must be a finite number")


def check_limits(node: Any, prefix: str = "") -> None:
    """Hold every setting under ``node``, a dataclass, against the limit beside its field."""
    for a_field in dataclasses.fields(node):
        name, value = prefix + a_field.name.rstrip("_"), getattr(node, a_field.name)
        if dataclasses.is_dataclass(value):
            check_limits(value, f"{name}.")
        elif "limit" in a_field.metadata:
            a_field.metadata["limit"].check(name, value)


def _check_nodes(config: Config) -> None:
    """The little that is known of a node whose class validates the rest."""
    nodes = {"data.dataset": config.data.dataset, "data.task": config.data.task}
    nodes |= {"model": config.model, "optim": config.optim, "schedule": config.schedule}
    for name, node in nodes.items():
        if "_target_" not in node:
            raise UserError(f"{name} has no _target_; it must name the class or function to call")
    lr = config.optim.get("lr")
    if not isinstance(lr, int | float | None):
        raise UserError(f"optim.lr is {lr!r}, but must be a number")
    if lr is not None and lr < 0:
        raise UserError(f"optim.lr is {lr}, but must be at least 0")


def _check_contradictions(config: Config) -> None:
    strategy, comm = config.strategy, config.comm
    if config.checkpoint.keep_best is not None and config.train.eval_every_epochs == 0:
        raise UserError(
            "checkpoint.keep_best needs evaluations, but train.eval_every_epochs is 0: never; set it to 1, "
            "or checkpoint.keep_best=null"
        )
    if isinstance(strategy, DdpConfig):
        if strategy.first_bucket_mb > strategy.bucket_cap_mb:
            raise UserError(
                f"strategy.first_bucket_mb is {strategy.first_bucket_mb}, but must be at most "
                f"strategy.bucket_cap_mb, {strategy.bucket_cap_mb}: it makes the first bucket smaller"
            )
    elif comm.algorithm != "native":
        raise UserError(
            f"comm={comm.algorithm} needs strategy=ddp, but strategy={strategy.name}: only DDP "
            "lets a hook replace its all-reduce; take strategy=ddp, or comm=native"
        )
    elif isinstance(comm, NativeCommConfig) and comm.wire_dtype != "fp32":
        raise UserError(
            f"comm.wire_dtype={comm.wire_dtype} needs strategy=ddp, but "
            f"strategy={strategy.name}; take strategy=ddp, or comm.wire_dtype=fp32"
        )
    if isinstance(config.fault, TimedFaultConfig):
        _check_phase_comes(config, config.fault)


def _check_phase_comes(config: Config, fault: TimedFaultConfig) -> None:
    """A fault that waits for what never happens would look like one that did no harm."""
    comm, train = config.comm, config.train
    if train.max_steps is not None and fault.step > train.max_steps:
        raise UserError(f"fault.step is {fault.step}, but the run has train.max_steps={train.max_steps}")
    if fault.phase == "evaluate" and train.eval_every_epochs == 0:
        raise UserError("fault.phase=evaluate never comes with train.eval_every_epochs=0")
    if fault.phase == "all_reduce":
        if not isinstance(config.strategy, DdpConfig):
            raise UserError(
                f"fault.phase=all_reduce is DDP's, and never comes with strategy={config.strategy.name}; "
                "take fault.phase=backward"
            )
        if isinstance(comm, NativeCommConfig) and comm.wire_dtype == "fp32" and not comm.timeline:
            raise UserError(
                "fault.phase=all_reduce cannot be seen with comm.timeline=false; set it to true, or take "
                "fault.phase=backward"
            )
