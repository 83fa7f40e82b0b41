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
from typing import Any

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


def each_above(limit: float) -> Any:
    return _limited(lambda values: values and min(values) > limit, f"numbers, each greater than {limit}")


def one_of(*values: str, default: str = MISSING) -> Any:
    return _limited(lambda value: value in values, f"one of {', '.join(values)}", default)


def like(pattern: str, words: str, default: Any = MISSING) -> Any:
    return _limited(lambda value: re.fullmatch(pattern, value) is not None, words, default)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


_PATTERN = Limit(_is_pattern, "a regular expression of parameter names")


def _seconds() -> Any:
    """A deadline; torch and the C library count it in nanoseconds, in 64 bits."""
    return _limited(lambda value: 0 < value <= 1e9, "greater than 0, and at most 1e9 (30 years)")


_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class ProfileConfig:
    """Steps `start` to `start + steps - 1`, counted from 1."""

    start: int = at_least(1)
    steps: int = at_least(1)


@dataclass
class TrainConfig:
    epochs: int = at_least(1)
    max_steps: int | None = at_least(1)
    global_batch_size: int = at_least(1)
    micro_batch_size: int | None = at_least(1)
    precision: str = one_of(*_PRECISIONS)
    matmul_precision: str = one_of("highest", "high")
    cudnn_benchmark: bool = MISSING
    compile: bool = MISSING
    compile_mode: str = one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    channels_last: bool = MISSING
    clip_grad_norm: float | None = above(0)
    log_every_steps: int = at_least(1)
    eval_every_epochs: int = at_least(0)
    eval_every_steps: int | None = at_least(1)
    check_replicas_every: int | None = at_least(1)
    histograms_every: int | None = at_least(1)
    peak_tflops: float | None = above(0)
    profile: ProfileConfig | None = MISSING

    def logs(self, step: int) -> bool:
        return step % self.log_every_steps == 0

    @property
    def evaluates(self) -> bool:
        return self.eval_every_epochs > 0 or self.eval_every_steps is not None


@dataclass
class EmaConfig:
    """A moving average of the weights; without a decay none is kept."""

    decay: float | None = _limited(lambda value: 0 <= value < 1, "from 0 to below 1")
    warmup: bool = MISSING
    evaluate: str = one_of("beside", "instead")


@dataclass
class ImagesConfig:
    mean: list[float] | None = MISSING
    std: list[float] | None = each_above(0)  # noqa: RUF009, it makes a field
    flip: bool = MISSING


@dataclass
class DataConfig:
    dataset: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    download: bool = MISSING
    train_transforms: list[Any] = MISSING
    eval_transforms: list[Any] = MISSING
    images: ImagesConfig = field(default_factory=ImagesConfig)
    on_bad_sample: str = one_of("raise", "skip")
    num_workers: int = at_least(0)
    prefetch_factor: int = at_least(1)
    pin_memory: bool | None = MISSING
    persistent_workers: bool = MISSING
    sharded: bool = MISSING


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
    """How DDP all-reduces gradients, and FSDP gathers and reduces shards; others take `native` only."""

    algorithm: str = MISSING


@dataclass
class NativeCommConfig(CommConfig):
    wire_dtype: str = one_of(*_PRECISIONS)
    timeline: bool = MISSING


@dataclass
class ScheduleCommConfig(CommConfig):
    wire_dtype: str = one_of(*_PRECISIONS)
    segment_mb: float | None = _limited(
        lambda value: 0.01 <= value <= 1e6, "at least 0.01, and at most 1e6 (1 TB)"
    )
    cuda_graph: bool = False


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

    @property
    def devices_each(self) -> int:
        """Devices that each process needs for itself; those it is told to take are not counted."""
        return 1


@dataclass
class UnitsConfig(StrategyConfig):
    """What is common to strategies that treat a model unit by unit (trainer/strategies/units.py)."""

    unit_min_params: int = _limited(lambda value: value >= 1, "at least 1", 1_000_000)
    activation_checkpointing: bool = False
    activation_checkpointing_every: int = _limited(lambda value: value >= 1, "at least 1", 1)
    activation_checkpointing_keep: list[str] = field(default_factory=list)


@dataclass
class SingleConfig(UnitsConfig):
    devices_per_replica: int = at_least(1)
    devices: list[str] | None = MISSING

    @property
    def devices_each(self) -> int:
        return self.devices_per_replica if self.devices is None else 1


@dataclass
class DdpConfig(UnitsConfig):
    bucket_cap_mb: float = _limited(lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)")
    first_bucket_mb: float = _limited(
        lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)"
    )
    gradient_as_bucket_view: bool = MISSING
    static_graph: bool = MISSING
    find_unused_parameters: bool = MISSING
    sync_batchnorm: bool = MISSING
    devices_per_replica: int = _limited(lambda value: value >= 1, "at least 1", 1)
    devices: list[str] | None = None

    @property
    def devices_each(self) -> int:
        return self.devices_per_replica if self.devices is None else 1


@dataclass
class FsdpConfig(UnitsConfig):
    shard_group: str = like(r"world|host|0*[1-9][0-9]*", "world, host or a number of ranks")
    reshard_after_forward: bool | None = MISSING
    prefetch_units: int | None = _limited(lambda value: value >= 1, "at least 1", None)
    reduce_every_micro_batch: bool = False
    cpu_offload: bool = MISSING
    param_dtype: str | None = one_of(*_PRECISIONS)
    reduce_dtype: str = one_of(*_PRECISIONS)


@dataclass
class ParameterServerConfig(UnitsConfig):
    servers: str = like(r"all|0*[1-9][0-9]*", "a number of ranks, 1 or more, or all")
    max_staleness: str = like(r"inf|\d+", "a number of steps, 0 or more, or inf")
    replay: str | None = _limited(bool, "a file that an asynchronous run has left, or null")
    bucket_mb: float = _limited(lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)")


@dataclass
class ParameterGroup:
    """An entry of optim.groups: parameters by their names, and what differs for them; null: as for others."""

    match: str = field(default=MISSING, metadata={"limit": _PATTERN})
    name: str | None = like(r"[\w.-]+", "of letters, digits and _.-: it names a curve", default=None)
    weight_decay: float | None = _limited(lambda value: 0 <= value < math.inf, "at least 0", None)
    lr_scale: float | None = _limited(lambda value: 0 <= value < math.inf, "at least 0", None)


@dataclass
class Undecayed:
    """optim.undecayed: which parameters have no weight decay, unless a group gives them one."""

    below_dims: int = _limited(lambda value: value >= 0, "at least 0", 0)
    match: str | None = field(default=None, metadata={"limit": _PATTERN})


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
    "single": SingleConfig,
    "dp": StrategyConfig,
    "ddp": DdpConfig,
    "fsdp": FsdpConfig,
    "parameter_server": ParameterServerConfig,
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

_SCHEDULES = [name for name, kind in COMMS.items() if kind is ScheduleCommConfig]

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
    ema: EmaConfig = field(default_factory=EmaConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    logger: dict[str, Any] = MISSING
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
    settings = dataclasses.asdict(config)
    settings["checkpoint"]["async"] = settings["checkpoint"].pop("async_")
    return settings


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
    nodes |= {f"logger.{name}": node for name, node in config.logger.items()}
    for split in ("train_transforms", "eval_transforms"):
        for number, node in enumerate(getattr(config.data, split)):
            nodes[f"data.{split}[{number}]"] = node
    for name, node in nodes.items():
        if not isinstance(node, dict) or "_target_" not in node:
            raise UserError(f"{name} has no _target_; it must name the class or function to call")
    lr = config.optim.get("lr")
    if not isinstance(lr, int | float | None):
        raise UserError(f"optim.lr is {lr!r}, but must be a number")
    if lr is not None and lr < 0:
        raise UserError(f"optim.lr is {lr}, but must be at least 0")

    parameter_groups(config.optim)
    for pattern in patterns("model.freeze", config.model.get("freeze")):
        _PATTERN.check("model.freeze", pattern)


def parameter_groups(optim: dict[str, Any]) -> tuple[list[ParameterGroup], Undecayed]:
    """The trainer's own part of `optim`, which no optimizer is given: `groups` and `undecayed`.

    Raises:
        UserError: an unknown key, a wrong type, a value outside its limits.
    """
    nodes = optim.get("groups") or []
    if not isinstance(nodes, list):
        raise UserError(f"optim.groups is {nodes}, but must be a list: [{{match: REGEX, weight_decay: 0}}]")
    groups = [_typed(ParameterGroup, f"optim.groups.{n}", node) for n, node in enumerate(nodes)]
    return groups, _typed(Undecayed, "optim.undecayed", optim.get("undecayed") or {})


def model_settings(model: dict[str, Any]) -> dict[str, Any]:
    """What of `model` its class is given: without that which is the trainer's own."""
    own = ("init_from", "init_ignore", "freeze")
    return {key: value for key, value in model.items() if key not in own}


def patterns(name: str, value: Any) -> list[str]:
    """A setting that is null, a regular expression, or a list of them."""
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise UserError(f"{name} is {value}, but must be a list of regular expressions")
    return listed


def _typed(kind: type[Any], name: str, node: Any) -> Any:
    """What stands at ``name`` in a `_target_` node, though it is the trainer's, as a ``kind``."""
    keys = [a.name for a in dataclasses.fields(kind)]
    if not isinstance(node, dict):
        raise UserError(f"{name} is {node}, but must hold settings: {', '.join(keys)}")
    try:
        value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), node))
    except ConfigKeyError as error:
        raise UserError(f"{name}.{error.key} is not a setting; there is {', '.join(keys)}") from error
    except MissingMandatoryValue as error:
        raise UserError(f"{name}.{error.full_key} has no value; give it one") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{name}.{error.full_key}: {str(error).splitlines()[0]}") from error
    check_limits(value, f"{name}.")
    return value


def _check_images(images: ImagesConfig) -> None:
    if len(images.mean or ()) != len(images.std or ()):
        raise UserError(
            f"data.images.mean is {images.mean}, but data.images.std is {images.std}; give both, with a "
            "number for each channel, or neither"
        )


def _check_contradictions(config: Config) -> None:
    _check_images(config.data.images)
    strategy, comm, train = config.strategy, config.comm, config.train
    if train.histograms_every is not None and train.histograms_every % train.log_every_steps:
        raise UserError(
            f"train.histograms_every is {train.histograms_every}, but must be a multiple of "
            f"train.log_every_steps, {train.log_every_steps}: histograms are taken at log steps"
        )
    if train.compile_mode != "default" and not train.compile:
        raise UserError(
            f"train.compile_mode is {train.compile_mode}, but train.compile is false; set it to true, or "
            "leave the mode out"
        )
    if config.checkpoint.keep_best is not None and not train.evaluates:
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
    elif isinstance(strategy, FsdpConfig) and isinstance(comm, ScheduleCommConfig):
        if comm.cuda_graph:
            raise UserError(
                "comm.cuda_graph=true needs strategy=ddp, whose buckets stay where they are in memory; with "
                "strategy=fsdp leave it out"
            )
    elif comm.algorithm != "native":
        raise UserError(
            f"comm={comm.algorithm} needs strategy=ddp, but strategy={strategy.name}; take strategy=ddp"
            + (f", or comm={', '.join(_SCHEDULES)}" if strategy.name == "fsdp" else "")
            + ", or comm=native"
        )
    elif isinstance(comm, NativeCommConfig) and comm.wire_dtype != "fp32":
        raise UserError(
            f"comm.wire_dtype={comm.wire_dtype} needs strategy=ddp, but "
            f"strategy={strategy.name}; take strategy=ddp, or comm.wire_dtype=fp32"
        )
    if isinstance(strategy, UnitsConfig) and not strategy.activation_checkpointing:
        for name, idle in (("every", 1), ("keep", [])):
            if (value := getattr(strategy, setting := f"activation_checkpointing_{name}")) != idle:
                raise UserError(
                    f"strategy.{setting} is {value}, but nothing is computed again: "
                    "set strategy.activation_checkpointing=true, too"
                )
    if isinstance(strategy, ParameterServerConfig):
        _check_parameter_server(config, strategy)
    if isinstance(strategy, SingleConfig | DdpConfig):
        named = strategy.devices
        if named is not None and len(named) != strategy.devices_per_replica:
            raise UserError(
                f"strategy.devices names {len(named)} devices, but strategy.devices_per_replica is "
                f"{strategy.devices_per_replica}; set it to {len(named)}"
            )
    if isinstance(config.fault, TimedFaultConfig):
        _check_phase_comes(config, config.fault)


def _check_parameter_server(config: Config, strategy: ParameterServerConfig) -> None:
    if config.train.precision == "fp16":
        raise UserError(
            "train.precision=fp16 scales the loss by what its gradients were, and with "
            "strategy=parameter_server those never meet in one place; take train.precision=bf16"
        )
    if strategy.max_staleness != "0" and config.train.profile is not None:
        raise UserError(
            f"train.profile records steps one by one, and strategy.max_staleness={strategy.max_staleness} "
            "leaves workers none in common; take strategy.max_staleness=0"
        )
    if strategy.max_staleness == "0" and strategy.replay is not None:
        raise UserError(
            f"strategy.replay={strategy.replay} repeats an asynchronous run, but strategy.max_staleness is "
            "0; give the one that run had"
        )


def _check_phase_comes(config: Config, fault: TimedFaultConfig) -> None:
    """A fault that waits for what never happens would look like one that did no harm."""
    comm, train = config.comm, config.train
    if train.max_steps is not None and fault.step > train.max_steps:
        raise UserError(f"fault.step is {fault.step}, but the run has train.max_steps={train.max_steps}")
    if fault.phase == "evaluate" and not train.evaluates:
        raise UserError("fault.phase=evaluate never comes with train.eval_every_epochs=0")
    if fault.phase == "all_reduce":
        shards = isinstance(config.strategy, FsdpConfig) and isinstance(comm, ScheduleCommConfig)
        if not isinstance(config.strategy, DdpConfig) and not shards:
            raise UserError(
                "fault.phase=all_reduce is DDP's, or FSDP's with comm=ring and the like, and never comes "
                f"with strategy={config.strategy.name} comm={comm.algorithm}; take fault.phase=backward"
            )
        if isinstance(comm, NativeCommConfig) and comm.wire_dtype == "fp32" and not comm.timeline:
            raise UserError(
                "fault.phase=all_reduce cannot be seen with comm.timeline=false; set it to true, or take "
                "fault.phase=backward"
            )
