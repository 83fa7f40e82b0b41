"""The schema of the trainer's settings, and their validation.

`load` is the only entry point: it converts the composed Hydra config to a typed `Config` or raises a
`UserError`. Models, datasets, tasks, optimizers and schedules are `_target_` nodes: their keys are arguments
of a class, which validates them itself. Defaults are in conf/, types and limits in schema.py, and conflicts
between settings in contradictions.py.

This package never imports torch, so that user errors are reported before torch is loaded.
"""

from trainer.config.contradictions import check_batch_sizes, check_one_process, check_processes
from trainer.config.limits import at_least, matching, one_of
from trainer.config.loading import flatten, load, to_yaml
from trainer.config.nodes import NoDecay, ParameterGroup, model_settings, parameter_groups, patterns
from trainer.config.schema import (
    AutoCommConfig,
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    DdpConfig,
    DistributedConfig,
    EarlyStoppingConfig,
    FsdpConfig,
    HookCommConfig,
    KeepBest,
    LaunchConfig,
    LocalLaunchConfig,
    NativeCommConfig,
    ParameterServerConfig,
    ProfileConfig,
    ScheduleCommConfig,
    SlurmLaunchConfig,
    TrainConfig,
    UnitsConfig,
)
