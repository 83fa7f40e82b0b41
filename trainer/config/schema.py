"""The types and limits of all settings, in every configuration group. Defaults are in conf/."""

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from omegaconf import MISSING

from trainer.config.limits import (
    PRECISIONS,
    above,
    at_least,
    count_or_never,
    limited,
    matching,
    one_of,
    seconds,
)


@dataclass
class CommConfig:
    """The gradient all-reduce of DDP. Other strategies support only `auto` and `native`."""

    algorithm: str = MISSING


@dataclass
class NativeCommConfig(CommConfig):
    wire_dtype: str = one_of(*PRECISIONS)
    timeline: bool = MISSING


@dataclass
class AutoCommConfig(NativeCommConfig):
    """comm=auto: `native`, unless a faster all-reduce is available (see `trainer.strategies.ddp_comm`)."""


@dataclass
class ScheduleCommConfig(CommConfig):
    wire_dtype: str = one_of(*PRECISIONS)
    segment_mb: float | None = limited(lambda value: 0.01 <= value <= 1e6, "from 0.01 to 1e6 (1 TB)")


@dataclass
class HookCommConfig(CommConfig):
    hook: dict[str, Any] = MISSING


@dataclass
class StrategyConfig:
    name: str = MISSING


@dataclass
class UnitsConfig(StrategyConfig):
    """Settings of strategies that handle a model unit by unit (see `trainer.strategies.units`)."""

    unit_min_params: int = limited(lambda value: value >= 1, "at least 1", 1_000_000)
    activation_checkpointing: bool = False
    activation_checkpointing_every: int = limited(lambda value: value >= 1, "at least 1", 1)
    activation_checkpointing_keep: list[str] = field(default_factory=list)


@dataclass
class DdpConfig(UnitsConfig):
    bucket_cap_mb: float = limited(lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)")
    gradient_as_bucket_view: bool = MISSING
    static_graph: bool = MISSING
    find_unused_parameters: bool = MISSING
    sync_batchnorm: bool = MISSING


@dataclass
class FsdpConfig(UnitsConfig):
    shard_group: str = matching(r"world|host|0*[1-9][0-9]*", "world, host or a number of ranks")
    reshard_after_forward: bool | None = MISSING
    reduce_every_micro_batch: bool = False
    find_unused_parameters: bool = False
    cpu_offload: bool = MISSING
    gather_for_evaluation: bool = False
    param_dtype: str | None = one_of(*PRECISIONS)
    reduce_dtype: str = one_of(*PRECISIONS)


@dataclass
class ParameterServerConfig(UnitsConfig):
    servers: str = matching(r"all|0*[1-9][0-9]*", "a number of ranks, 1 or more, or all")
    bucket_mb: float = limited(lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)")


@dataclass
class LaunchConfig:
    """How the processes of a run are started; `external` means by torchrun, srun, mpirun or by hand."""

    in_cluster: ClassVar[bool] = False
    """Whether a scheduler starts the processes, possibly later and on other hosts."""

    name: str = MISSING

    @property
    def num_processes(self) -> int | None:
        """The total number of processes; None if it is not known yet."""
        return None

    @property
    def returns_result(self) -> bool:
        """Whether the launcher returns only after the run has ended and written its result."""
        return True


@dataclass
class LocalLaunchConfig(LaunchConfig):
    processes: int | None = at_least(1)
    max_restarts: int = at_least(0)

    @property
    def num_processes(self) -> int | None:
        return self.processes


@dataclass
class SlurmLaunchConfig(LaunchConfig):
    in_cluster = True

    nodes: int = at_least(1)
    processes: int = at_least(1)
    gpus: int | None = at_least(0)
    memory: str | None = MISSING
    partition: str | None = MISSING
    time: str | None = matching(r"\d+|(\d+-)?\d+(:\d+){0,2}", "minutes or DAYS-HOURS:MINUTES:SECONDS")
    parameters: dict[str, Any] | None = MISSING
    setup: list[str] = MISSING
    save_before_s: int = at_least(1)
    requeue: bool = MISSING
    wait: bool = MISSING
    dry_run: bool = MISSING

    @property
    def num_processes(self) -> int | None:
        return self.nodes * self.processes

    @property
    def returns_result(self) -> bool:
        return self.wait and not self.dry_run


STRATEGIES: dict[str, type[StrategyConfig]] = {
    "single": UnitsConfig,
    "dp": StrategyConfig,
    "ddp": DdpConfig,
    "fsdp": FsdpConfig,
    "parameter_server": ParameterServerConfig,
}

COMMS: dict[str, type[CommConfig]] = {
    "auto": AutoCommConfig,
    "native": NativeCommConfig,
    "ring": ScheduleCommConfig,
    "tree": ScheduleCommConfig,
    "halving_doubling": ScheduleCommConfig,
    "hierarchical": ScheduleCommConfig,
    "master_worker": ScheduleCommConfig,
    "hook": HookCommConfig,
}

SCHEDULES = [name for name, kind in COMMS.items() if kind is ScheduleCommConfig]

LAUNCHES: dict[str, type[LaunchConfig]] = {
    "external": LaunchConfig,
    "local": LocalLaunchConfig,
    "slurm": SlurmLaunchConfig,
}


@dataclass
class ProfileConfig:
    """The steps to trace: `start` to `start + steps - 1`, counted from 1."""

    start: int = at_least(1)
    steps: int = at_least(1)


@dataclass
class EarlyStoppingConfig:
    """End a run after `patience` consecutive evaluations without an improvement by more than `min_delta`."""

    metric: str = MISSING
    patience: int = at_least(1)
    mode: str = one_of("min", "max", default="min")
    min_delta: float = limited(lambda value: value >= 0, "at least 0", 0.0)


@dataclass
class TrainConfig:
    epochs: int = at_least(1)
    max_steps: int | None = at_least(1)
    max_hours: float | None = above(0)
    early_stopping: EarlyStoppingConfig | None = MISSING
    global_batch_size: int = at_least(1)
    micro_batch_size: int | str | None = limited(
        lambda value: value == "auto" or (isinstance(value, int) and value >= 1), "at least 1, auto or null"
    )
    exact: int | None = limited(lambda value: 1 <= value <= 1024, "from 1 to 1024 chunks, or null")
    precision: str = one_of(*PRECISIONS)
    matmul_precision: str = one_of("highest", "high")
    cudnn_benchmark: bool = MISSING
    compile: bool = MISSING
    compile_mode: str = one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    channels_last: bool = MISSING
    clip_grad_norm: float | None = above(0)
    skip_nonfinite: int = count_or_never()
    skip_steps: list[Any] = limited(  # noqa: RUF009, it creates a field
        lambda ranges: (
            all(isinstance(each, list) and [*map(type, each)] == [int, int] for each in ranges)
            and all(1 <= first <= last for first, last in ranges)
            and all(before[1] < after[0] for before, after in pairwise(sorted(ranges)))
        ),
        "ranges [first, last] of steps, counted from 1 and without overlap, such as [[48100, 48300]]",
    )
    log_every_steps: int | str | None = limited(
        lambda value: value == "auto" or (isinstance(value, int) and value >= 1), "auto, at least 1, or null"
    )
    eval_every_epochs: int = count_or_never()
    eval_every_steps: int | None = at_least(1)
    show_every: int | None = at_least(1)
    check_replicas_every: int | None = at_least(1)
    verify_every: int | None = at_least(1)
    histograms_every: int | None = at_least(1)
    peak_tflops: float | None = above(0)
    profile: ProfileConfig | None = MISSING

    def log_interval(self, total_steps: int) -> int | None:
        """Return the number of steps between log lines in a run of `total_steps`; None if it never logs.

        With `auto`, short runs log 50 times, and the interval divides `histograms_every`.
        """
        if self.log_every_steps != "auto":
            return None if self.log_every_steps is None else int(self.log_every_steps)
        return math.gcd(min(50, max(1, total_steps // 50)), self.histograms_every or 0)

    def skips(self, step: int) -> bool:
        """Return whether `step` is one of `skip_steps`."""
        return any(first <= step <= last for first, last in self.skip_steps)

    def own_chunks(self, num_replicas: int, replica: int) -> range:
        """Return the chunks of each step that `replica` computes. Call only if `exact` is set."""
        assert self.exact is not None
        return range(replica * self.exact // num_replicas, (replica + 1) * self.exact // num_replicas)

    @property
    def known_micro_batch_size(self) -> int | None:
        """`micro_batch_size` if it is a number, otherwise None."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None

    @property
    def evaluates(self) -> bool:
        return self.eval_every_epochs > 0 or self.eval_every_steps is not None


@dataclass
class EmaConfig:
    """Exponential moving average of the weights; disabled if `decay` is None."""

    decay: float | None = limited(lambda value: 0 <= value < 1, "from 0 to below 1")
    warmup: bool = MISSING
    evaluate: str = one_of("both", "ema")


@dataclass
class ImagesConfig:
    mean: list[float] | None = MISSING
    std: list[float] | None = limited(  # noqa: RUF009, it creates a field
        lambda values: all(value > 0 for value in values), "numbers, each greater than 0"
    )


@dataclass
class DataConfig:
    dataset: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    download: bool = MISSING
    train_transforms: list[Any] = MISSING
    eval_transforms: list[Any] = MISSING
    collate: dict[str, Any] | None = MISSING
    order: dict[str, Any] | None = MISSING
    images: ImagesConfig = field(default_factory=ImagesConfig)
    on_bad_sample: str = one_of("raise", "skip")
    num_workers: int = at_least(0)
    prefetch_factor: int = at_least(1)
    pin_memory: bool | None = MISSING
    persistent_workers: bool = MISSING
    sharded: bool = MISSING


@dataclass
class DistributedConfig:
    device: str = one_of("auto", "cpu", "cuda", "xpu", "mps")
    backend: str | None = one_of("gloo", "nccl", "cpu:gloo,cuda:nccl")
    timeout_s: float = seconds()
    shrink: bool = MISSING
    init_method: str = matching(
        r"env://|tcp://(\[[0-9a-fA-F:.]+\]|[^/:]+):\d+|file:///.+", "env://, tcp://HOST:PORT or file:///PATH"
    )
    rank: int | None = at_least(0)
    world_size: int | None = at_least(1)
    ranks_per_gpu: int | str = limited(
        lambda value: value == "auto" or (isinstance(value, int) and value >= 1), "at least 1, or auto", 1
    )


@dataclass
class KeepBest:
    metric: str = MISSING
    mode: str = one_of("min", "max", default="min")


@dataclass
class CheckpointConfig:
    format: str = one_of("full", "sharded")
    every_steps: int | None = at_least(1)
    every_minutes: float | None = above(0)
    every_epochs: int | None = at_least(1)
    on_failure: bool = MISSING
    frozen: bool = MISSING
    keep_last: int = at_least(1)
    keep_best: KeepBest | None = MISSING
    keep_every: int | None = at_least(1)
    async_: bool = MISSING  # `async` for users, but reserved in Python
    timeout_s: float = seconds()
    remote: str | None = matching(
        r"[a-z0-9+]+(::[a-z0-9+]+)*://(?![^/]*:[^/]*@)[^?*\[\s]+",  # * and [ are wildcards of fsspec
        "an address that fsspec supports, such as s3://BUCKET/FOLDER or file:///FOLDER, without * and [, and "
        "without a password or key, which belong in the environment",
        default=None,
    )

    @property
    def best(self) -> KeepBest:
        """The metric and mode that define the best evaluation, also in runs without `keep_best`."""
        return self.keep_best or KeepBest("eval/loss")


@dataclass
class Config:
    """All settings of a run. Dicts are `_target_` nodes, whose lists are plain lists."""

    seed: int | None = limited(lambda value: 0 <= value < 2**64, "from 0 to 2**64 - 1")
    run_dir: str | None = limited(
        bool, "a path ('.' is the current directory), or null for a new one under runs/"
    )
    resume: str | None = limited(bool, "auto, the path of a checkpoint, or null")
    vars: dict[str, Any] = MISSING
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
    logger: dict[str, Any] = MISSING
    launch: LaunchConfig = field(default_factory=LaunchConfig)


GROUPS = tuple(a.name for a in dataclasses.fields(Config) if dataclasses.is_dataclass(a.default_factory))
