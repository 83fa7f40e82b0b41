"""The schema of every setting the trainer owns, and all validation.

`load` is the only door: it turns what Hydra composed into one typed `Config`, or raises a `UserError`.
Models, datasets, tasks, optimizers and schedules are `_target_` nodes: their keys belong to the class
they name, which validates them itself. Defaults live in conf/, this file holds types and limits.
Imports no torch, so that a mistake is reported before torch has loaded.
"""

import copy
import dataclasses
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from trainer.errors import UserError


@dataclass
class TrainConfig:
    epochs: int = MISSING
    max_steps: int | None = MISSING
    global_batch_size: int = MISSING
    micro_batch_size: int | None = MISSING
    precision: str = MISSING
    compile: bool = MISSING
    channels_last: bool = MISSING
    clip_grad_norm: float | None = MISSING
    log_every_steps: int = MISSING
    eval_every_epochs: int = MISSING


@dataclass
class DataConfig:
    dataset: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    download: bool = MISSING
    on_bad_sample: str = MISSING
    num_workers: int = MISSING
    prefetch_factor: int = MISSING
    pin_memory: bool | None = MISSING
    persistent_workers: bool = MISSING


@dataclass
class DistributedConfig:
    device: str = MISSING
    backend: str | None = MISSING
    timeout_s: float = MISSING


@dataclass
class CommConfig:
    """How DDP all-reduces its gradients; ignored by no strategy: the others refuse all but `native`."""

    algorithm: str = MISSING


@dataclass
class NativeCommConfig(CommConfig):
    wire_dtype: str = MISSING
    timeline: bool = MISSING


@dataclass
class ScheduleCommConfig(CommConfig):
    wire_dtype: str = MISSING
    segment_mb: float = MISSING


@dataclass
class PowerSgdCommConfig(CommConfig):
    matrix_approximation_rank: int = MISSING
    start_step: int = MISSING
    min_compression_rate: float = MISSING
    use_error_feedback: bool = MISSING
    warm_start: bool = MISSING


@dataclass
class KeepBest:
    metric: str = MISSING
    mode: str = "min"


@dataclass
class CheckpointConfig:
    format: str = MISSING
    every_steps: int | None = MISSING
    every_epochs: int | None = MISSING
    keep_last: int = MISSING
    keep_best: KeepBest | None = MISSING
    keep_every: int | None = MISSING
    async_: bool = MISSING  # `async` to the person, but a word of Python's own
    timeout_s: float = MISSING


@dataclass
class StrategyConfig:
    name: str = MISSING


@dataclass
class DdpConfig(StrategyConfig):
    bucket_cap_mb: float = MISSING
    first_bucket_mb: float = MISSING
    gradient_as_bucket_view: bool = MISSING
    static_graph: bool = MISSING
    find_unused_parameters: bool = MISSING
    sync_batchnorm: bool = MISSING


@dataclass
class FsdpConfig(StrategyConfig):
    shard_group: str = MISSING
    unit_min_params: int = MISSING
    reshard_after_forward: bool = MISSING
    cpu_offload: bool = MISSING
    activation_checkpointing: bool = MISSING
    param_dtype: str | None = MISSING
    reduce_dtype: str = MISSING


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


@dataclass
class Config:
    """Everything a run is told. Dicts are `_target_` nodes, lists in them are plain lists."""

    seed: int | None = MISSING
    run_dir: str | None = MISSING
    resume: str | None = MISSING
    model: dict[str, Any] = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    optim: dict[str, Any] = MISSING
    schedule: dict[str, Any] = MISSING
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def load(composed: DictConfig) -> Config:
    """Return the typed, resolved and validated settings.

    Raises:
        UserError: an unknown key (also one added with `+`), a wrong type, a value outside its limits, a
            missing value, or two settings that contradict each other.
    """
    try:
        _require(composed, "strategy.name", "in", STRATEGIES)
        _require(composed, "comm.algorithm", "in", COMMS)
        schema = OmegaConf.structured(Config)
        schema.strategy = OmegaConf.structured(STRATEGIES[composed.strategy.name])
        schema.comm = OmegaConf.structured(COMMS[composed.comm.algorithm])
        merged = OmegaConf.merge(schema, _renamed(composed, "async", "async_"))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{missing[0]} has no value; give it one: {missing[0]}=...")
        config = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        key = error.full_key or str(error.key)
        raise UserError(f"{key} is not a setting{_did_you_mean(key, composed)}") from error
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} has no value; give it one: {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{str(error.full_key).rstrip('_')}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    _validate(config)
    return config


def flatten(config: Config) -> dict[str, Any]:
    """Return every setting by its dotted name, as a person would write it on the command line."""
    return dict(_leaves(_as_dict(config), ""))


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


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _did_you_mean(key: str, composed: DictConfig) -> str:
    known = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(composed)), resolve=False)
    names = [name for name, _ in _leaves(known, "") if name != key]
    near = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean {near[0]}?" if near else "; `python train.py --cfg job` prints all settings"


_CHECKS = {
    "in": (lambda value, limit: value in limit, "one of"),
    ">": (lambda value, limit: value > limit, "greater than"),
    ">=": (lambda value, limit: value >= limit, "at least"),
}


def _require(config: Any, name: str, relation: str, limit: Any) -> None:
    """Check `config.<name> <relation> <limit>`; None means absent and passes."""
    value = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict | DictConfig) else getattr(value, part)
    holds, words = _CHECKS[relation]
    if value is not None and not holds(value, limit):
        shown = ", ".join(map(str, limit)) if relation == "in" else limit
        raise UserError(f"{name} is {value}, but must be {words} {shown}")


def _validate(config: Config) -> None:
    for name, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}, but must be a finite number")
    nodes = {"data.dataset": config.data.dataset, "data.task": config.data.task}
    nodes |= {"model": config.model, "optim": config.optim, "schedule": config.schedule}
    for name, node in nodes.items():
        if "_target_" not in node:
            raise UserError(f"{name} has no _target_; it must name the class or function to call")
    if not isinstance(config.optim.get("lr"), int | float | None):
        raise UserError(f"optim.lr is {config.optim['lr']!r}, but must be a number")

    _require(config, "seed", ">=", 0)
    _require(config, "optim.lr", ">=", 0)
    _require(config, "train.epochs", ">=", 1)
    _require(config, "train.max_steps", ">=", 1)
    _require(config, "train.global_batch_size", ">=", 1)
    _require(config, "train.micro_batch_size", ">=", 1)
    _require(config, "train.precision", "in", ("fp32", "bf16", "fp16"))
    _require(config, "train.clip_grad_norm", ">", 0)
    _require(config, "train.log_every_steps", ">=", 1)
    _require(config, "train.eval_every_epochs", ">=", 0)
    _require(config, "data.on_bad_sample", "in", ("raise", "skip"))
    _require(config, "data.num_workers", ">=", 0)
    _require(config, "data.prefetch_factor", ">=", 1)
    _require(config, "distributed.device", "in", ("auto", "cpu", "cuda"))
    _require(config, "distributed.backend", "in", ("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl"))
    _require(config, "distributed.timeout_s", ">", 0)
    if isinstance(config.comm, NativeCommConfig | ScheduleCommConfig):
        _require(config, "comm.wire_dtype", "in", ("fp32", "bf16", "fp16"))
    if isinstance(config.comm, ScheduleCommConfig):
        _require(config, "comm.segment_mb", ">=", 0.01)
    if isinstance(config.comm, PowerSgdCommConfig):
        _require(config, "comm.matrix_approximation_rank", ">=", 1)
        _require(config, "comm.min_compression_rate", ">", 0)
        # DDP lays out its buckets anew after the first step, and PowerSGD keeps state for each.
        _require(config, "comm.start_step", ">=", 2)
    _require(config, "checkpoint.format", "in", ("full", "sharded"))
    _require(config, "checkpoint.every_steps", ">=", 1)
    _require(config, "checkpoint.every_epochs", ">=", 1)
    _require(config, "checkpoint.keep_last", ">=", 1)
    _require(config, "checkpoint.keep_every", ">=", 1)
    _require(config, "checkpoint.timeout_s", ">", 0)
    if config.checkpoint.keep_best is not None:
        _require(config, "checkpoint.keep_best.mode", "in", ("min", "max"))

    if config.resume is not None and config.seed is None:
        raise UserError("resume needs the seed of the run it goes on with; train.log and config.yaml name it")

    if isinstance(config.strategy, DdpConfig):
        _require(config, "strategy.bucket_cap_mb", ">", 0)
        _require(config, "strategy.first_bucket_mb", ">", 0)
    elif config.comm.algorithm != "native":
        raise UserError(
            f"comm={config.comm.algorithm} needs strategy=ddp, but strategy={config.strategy.name}: only DDP "
            "lets a hook replace its all-reduce; take strategy=ddp, or comm=native"
        )
    elif isinstance(config.comm, NativeCommConfig) and config.comm.wire_dtype != "fp32":
        raise UserError(
            f"comm.wire_dtype={config.comm.wire_dtype} needs strategy=ddp, but "
            f"strategy={config.strategy.name}; take strategy=ddp, or comm.wire_dtype=fp32"
        )
    if isinstance(config.strategy, FsdpConfig):
        _require(config, "strategy.unit_min_params", ">=", 1)
        _require(config, "strategy.param_dtype", "in", ("fp32", "bf16", "fp16"))
        _require(config, "strategy.reduce_dtype", "in", ("fp32", "bf16", "fp16"))
        group = config.strategy.shard_group
        if group not in ("world", "host") and not (group.isdigit() and int(group) >= 1):
            raise UserError(f"strategy.shard_group is {group}, but must be world, host or a number of ranks")
