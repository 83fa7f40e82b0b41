"""The schema of every setting the trainer owns, and all validation.

`load` is the only entry point: it turns what Hydra composed into one typed `Config`, or raises a `UserError`.
Models, datasets, tasks, optimizers and schedules are `_target_` nodes: their keys belong to the class
they name, which validates them itself. Defaults are in conf/, types and limits in schema.py, and conflicts
between two settings in contradictions.py.
Never imports torch, so that a user error is reported before torch has loaded.
"""

from trainer.config.contradictions import check_one_process, check_processes, check_shares
from trainer.config.limits import above, at_least, check_limits, like, one_of
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
    EmaConfig,
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
