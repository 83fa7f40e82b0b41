"""Conflicts between two settings."""

from trainer.config.schema import (
    SCHEDULES,
    CommConfig,
    Config,
    DdpConfig,
    HookCommConfig,
    NativeCommConfig,
    ScheduleCommConfig,
    SlurmLaunchConfig,
    StrategyConfig,
)
from trainer.errors import UserError


def check_contradictions(config: Config) -> None:
    strategy, train, images = config.strategy, config.train, config.data.images
    if len(images.mean or ()) != len(images.std or ()):
        raise UserError(
            f"data.images.mean is {images.mean}, but data.images.std is {images.std}; set both, with a "
            "number for each channel, or neither"
        )
    if config.resume == "auto" and config.run_dir is None:
        raise UserError(
            "resume=auto continues the run in run_dir, but run_dir is null, which means a new directory for "
            "each run; set it, as in run_dir=runs/mine resume=auto"
        )
    interval = train.log_interval(1)
    if train.histograms_every is not None and (interval is None or train.histograms_every % interval):
        raise UserError(
            f"train.histograms_every is {train.histograms_every}, but must be a multiple of "
            f"train.log_every_steps, {train.log_every_steps}: histograms are taken at log steps"
        )
    if train.compile_mode == "reduce-overhead" and strategy.name == "fsdp":
        raise UserError(
            "train.compile_mode=reduce-overhead replays a graph with the addresses of its weights, which "
            "strategy=fsdp gathers elsewhere in each pass; leave the mode out, or use strategy=ddp"
        )
    if config.checkpoint.format == "full" and strategy.name == "fsdp":
        raise UserError(
            "checkpoint=full lets rank 0 write everything, but under strategy=fsdp each rank only has a "
            "shard; use checkpoint=sharded, the default of fsdp. Any strategy can resume from it on any "
            "number of ranks, and `python -m trainer.checkpoint convert` makes one file of its weights"
        )
    for name, value in (
        ("checkpoint.keep_best", config.checkpoint.keep_best),
        ("train.early_stopping", train.early_stopping),
    ):
        if value is not None and not train.evaluates:
            raise UserError(
                f"{name} needs evaluations, but train.eval_every_epochs is 0: never; set it to 1, or "
                f"{name}=null"
            )
    if train.skip_nonfinite and isinstance(config.comm, HookCommConfig):
        raise UserError(
            f"train.skip_nonfinite is {train.skip_nonfinite}, but the state of comm=hook may keep a part of "
            "each step's gradients for the next, NaN as well; set it to 0, or use another comm"
        )
    if train.compile and strategy.name == "dp":
        raise UserError(
            "train.compile=true does not go with strategy=dp, whose threads torch cannot trace in; use "
            "strategy=ddp, or set it to false"
        )
    if train.micro_batch_size == "auto" and train.exact is not None:
        raise UserError(
            f"train.micro_batch_size=auto does not go with train.exact={train.exact}, whose chunks are the "
            "micro-batches; set it to null"
        )
    _check_comm(strategy, config.comm)
    if train.exact is not None:
        _check_exact(config)
    if config.distributed.shrink:
        _check_shrink(config)
    if isinstance(config.launch, SlurmLaunchConfig):
        _check_slurm(config.launch)


def check_processes(config: Config) -> None:
    """Refuse a number of processes that the strategy or the batch size can't use, if it is known already.

    `load` does not call it, because evaluation works on any number of processes.
    """
    strategy, train, num_processes = config.strategy.name, config.train, config.launch.num_processes
    if num_processes is None:
        return
    if strategy in ("single", "dp"):
        check_one_process(strategy, num_processes)
    elif strategy in ("ddp", "fsdp") and train.exact is None:
        check_shares(train.global_batch_size, train.known_micro_batch_size, num_processes)


def check_one_process(strategy: str, num_processes: int) -> None:
    if num_processes > 1:
        raise UserError(
            f"strategy={strategy} runs in one process, not in {num_processes}; start it with "
            "`python train.py`, or use strategy=ddp"
        )


def check_shares(global_batch_size: int, micro_batch_size: int | None, num_replicas: int) -> None:
    """Refuse batch sizes that do not divide evenly; the message names the nearest size that does."""
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        above = below + num_replicas
        nearest = above if below == 0 or above - global_batch_size < global_batch_size - below else below
        raise UserError(
            f"train.global_batch_size is {global_batch_size}, which does not divide over {num_replicas} "
            f"replicas; nearest that does: {nearest}"
        )
    local_size = global_batch_size // num_replicas
    if micro_batch_size is not None and local_size % micro_batch_size:
        divisors = [size for size in range(1, local_size + 1) if local_size % size == 0]
        raise UserError(
            f"train.micro_batch_size is {micro_batch_size}, which does not divide the {local_size} samples "
            f"that each of {num_replicas} replicas takes of train.global_batch_size={global_batch_size}; "
            f"nearest that does: {min(divisors, key=lambda size: abs(size - micro_batch_size))}"
        )


def _check_comm(strategy: StrategyConfig, comm: CommConfig) -> None:
    if isinstance(strategy, DdpConfig):
        return
    if not isinstance(comm, NativeCommConfig):
        raise UserError(
            f"comm={comm.algorithm} needs strategy=ddp, but strategy={strategy.name}; use strategy=ddp, or "
            "comm=native"
        )
    if comm.wire_dtype != "fp32":
        raise UserError(
            f"comm.wire_dtype={comm.wire_dtype} needs strategy=ddp, but "
            f"strategy={strategy.name}; use strategy=ddp, or comm.wire_dtype=fp32"
        )


def _check_shrink(config: Config) -> None:
    """Refuse what ranks that are left cannot go on with."""
    checkpoint = config.checkpoint
    if config.strategy.name != "ddp":
        words = f"strategy={config.strategy.name}, but ranks have all of the model under strategy=ddp alone"
    elif isinstance(config.comm, HookCommConfig):
        words = "comm=hook, whose groups the trainer does not know; use another comm"
    elif not checkpoint.on_failure:
        words = (
            "checkpoint.on_failure=false: the others go on from the step that is saved then; set it to true"
        )
    elif checkpoint.remote is not None:
        words = f"checkpoint.remote={checkpoint.remote}, to which the former rank 0 may still copy"
    else:
        return
    raise UserError(f"distributed.shrink=true does not go with {words}")


def _check_slurm(launch: SlurmLaunchConfig) -> None:
    """Refuse a time limit without time to train, and a job array, whose tasks would share one run_dir."""
    parameters = launch.parameters or {}
    if "array" in parameters:
        raise UserError(
            f"launch.parameters.array is {parameters['array']}, but all tasks of an array would train in the "
            "same run_dir; remove it and submit a sweep, which gives each run its own job and run_dir: "
            "python train.py -m seed=0,1,2 launch=slurm hydra.sweep.dir=runs/seeds"
        )
    for name, setting in (("time", "launch.time"), ("signal", "launch.save_before_s")):
        if name in parameters:
            raise UserError(f"launch.parameters.{name} is {parameters[name]}; set {setting} instead")
    limit_s = _seconds_of(launch.time or "0")  # 0: no limit
    if limit_s and launch.save_before_s > limit_s - 60:
        raise UserError(
            f"launch.save_before_s is {launch.save_before_s}, but must be at least 60 s shorter than the "
            f"time limit, launch.time={launch.time} ({limit_s} s), or the run would stop before it trains; "
            "set a higher launch.time, or a lower launch.save_before_s"
        )


def _seconds_of(time: str) -> int:
    """Return the seconds of a SLURM time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, has_days, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if has_days or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _check_exact(config: Config) -> None:
    """Refuse what cannot have the same bits everywhere."""
    strategy, comm, train = config.strategy, config.comm, config.train
    wire_dtype, options = getattr(comm, "wire_dtype", "fp32"), vars(strategy)
    if strategy.name not in ("single", "ddp", "fsdp"):
        words = f"strategy={strategy.name}, whose sums depend on the ranks; use strategy=single, ddp or fsdp"
    elif not isinstance(comm, NativeCommConfig | ScheduleCommConfig):
        words = f"comm={comm.algorithm}, which is not a sum; use comm=native, {', '.join(SCHEDULES)}"
    elif wire_dtype != "fp32":
        words = f"comm.wire_dtype={wire_dtype}, but sends gradients as integers; set comm.wire_dtype=fp32"
    elif train.precision == "fp16":
        words = "train.precision=fp16, whose scale follows the ranks; use bf16 or fp32"
    elif train.compile:
        words = "train.compile=true, which fuses a model differently in each strategy; set it to false"
    elif options.get("sync_batchnorm"):
        words = "strategy.sync_batchnorm=true, which depends on the ranks; set it to false: statistics of "
        words += "chunks are averaged"
    elif options.get("static_graph"):
        words = "strategy.static_graph=true, with which DDP cannot add chunks; set it to false"
    elif (group := options.get("shard_group", "world")) != "world":
        words = f"strategy.shard_group={group}, whose replicas add sums of their own; set it to world"
    elif strategy.name == "fsdp" and train.channels_last:
        words = "train.channels_last=true, gathered in another layout by strategy=fsdp; use strategy=ddp"
    elif (dtype := options.get("reduce_dtype", "fp32")) != "fp32":
        words = f"strategy.reduce_dtype={dtype}, but adds integers; set it to fp32"
    else:
        return
    raise UserError(f"train.exact={train.exact} does not go with {words}")
