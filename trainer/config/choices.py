"""The settings of each choice of the groups strategy, comm and launch."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from trainer.config.limits import PRECISIONS, at_least, like, limited, one_of


@dataclass
class CommConfig:
    """How DDP all-reduces gradients; other strategies take only `auto` and `native`."""

    algorithm: str = MISSING


@dataclass
class NativeCommConfig(CommConfig):
    wire_dtype: str = one_of(*PRECISIONS)
    timeline: bool = MISSING


@dataclass
class AutoCommConfig(NativeCommConfig):
    """`native`, except where DDP has a faster all-reduce: see `trainer.strategies.ddp_comm`."""


@dataclass
class ScheduleCommConfig(CommConfig):
    wire_dtype: str = one_of(*PRECISIONS)
    segment_mb: float | None = limited(
        lambda value: 0.01 <= value <= 1e6, "at least 0.01, and at most 1e6 (1 TB)"
    )


@dataclass
class HookCommConfig(CommConfig):
    hook: dict[str, Any] = MISSING


@dataclass
class StrategyConfig:
    name: str = MISSING


@dataclass
class UnitsConfig(StrategyConfig):
    """Settings of strategies that treat a model unit by unit (trainer/strategies/units.py)."""

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
    shard_group: str = like(r"world|host|0*[1-9][0-9]*", "world, host or a number of ranks")
    reshard_after_forward: bool | None = MISSING
    reduce_every_micro_batch: bool = False
    find_unused_parameters: bool = False
    separate_reduce_scatter: bool = False
    symmetric_memory: bool = False
    cpu_offload: bool = MISSING
    param_dtype: str | None = one_of(*PRECISIONS)
    reduce_dtype: str = one_of(*PRECISIONS)


@dataclass
class ParameterServerConfig(UnitsConfig):
    servers: str = like(r"all|0*[1-9][0-9]*", "a number of ranks, 1 or more, or all")
    bucket_mb: float = limited(lambda value: 0 < value <= 1e6, "greater than 0, and at most 1e6 (1 TB)")


@dataclass
class LaunchConfig:
    """How the processes of a run are started; `as_started`: as this process was, by torchrun for instance."""

    in_cluster: ClassVar[bool] = False
    """Whether a scheduler starts them, maybe later and on other hosts, with devices of their own."""

    name: str = MISSING

    @property
    def leaves_result(self) -> bool:
        """Whether the run has ended, and left its result, when its launcher returns."""
        return True


@dataclass
class LocalLaunchConfig(LaunchConfig):
    processes: int | None = at_least(1)
    max_restarts: int = at_least(0)


@dataclass
class SlurmLaunchConfig(LaunchConfig):
    in_cluster = True

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

    @property
    def leaves_result(self) -> bool:
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
    "as_started": LaunchConfig,
    "local": LocalLaunchConfig,
    "slurm": SlurmLaunchConfig,
}
