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
            f"train.log_every_steps={train.log_every_steps}, because histograms are logged at log steps"
        )
    if train.compile_mode == "reduce-overhead" and strategy.name == "fsdp":
        raise UserError(
            "train.compile_mode=reduce-overhead is not supported with strategy=fsdp, because a CUDA graph "
            "reuses fixed memory addresses, but FSDP gathers the weights at a new address in each pass; "
            "remove train.compile_mode, or use strategy=ddp"
        )
    if config.checkpoint.format == "full" and strategy.name == "fsdp":
        raise UserError(
            "checkpoint=full is not supported with strategy=fsdp, because rank 0 has only a shard of the "
            "state; use checkpoint=sharded, the default of fsdp. Any strategy can resume from it on any "
            "number of ranks, and `python -m trainer.checkpoint convert` turns it into a single file"
        )
    for name, value in (
        ("checkpoint.keep_best", config.checkpoint.keep_best),
        ("train.early_stopping", train.early_stopping),
    ):
        if value is not None and not train.evaluates:
            raise UserError(
                f"{name} requires evaluations, but train.eval_every_epochs is 0, which disables them; set "
                f"train.eval_every_epochs=1 or {name}=null"
            )
    if train.skip_nonfinite and isinstance(config.comm, HookCommConfig):
        raise UserError(
            f"train.skip_nonfinite={train.skip_nonfinite} is not supported with comm=hook, because the state "
            "of the hook may carry NaN over to the next step; set it to 0, or use another comm"
        )
    if train.compile and strategy.name == "dp":
        raise UserError(
            "train.compile=true is not supported with strategy=dp, because torch.compile cannot trace its "
            "threads; use strategy=ddp, or set train.compile=false"
        )
    if train.micro_batch_size == "auto" and train.exact is not None:
        raise UserError(
            f"train.micro_batch_size=auto is not supported with train.exact={train.exact}, because chunks "
            "are the micro-batches; set train.micro_batch_size=null"
        )
    if config.distributed.device == "mps":
        _check_mps(config)
    _check_comm(strategy, config.comm)
    if train.exact is not None:
        _check_exact(config)
    if train.verify_every is not None and (train.exact is None or config.strategy.name == "single"):
        raise UserError(
            f"train.verify_every={train.verify_every} needs train.exact and strategy=ddp or fsdp, because "
            "another rank recomputes a chunk of the batch and compares the bits; set train.exact to the "
            "number of chunks, such as the largest number of ranks, or set train.verify_every=null"
        )
    if config.distributed.shrink:
        _check_shrink(config)
    if isinstance(config.launch, SlurmLaunchConfig):
        _check_slurm(config.launch)


def check_processes(config: Config) -> None:
    """Raise UserError if the known number of processes does not suit the strategy or batch size.

    `load` does not call this, because evaluation works with any number of processes.
    """
    strategy, train, num_processes = config.strategy.name, config.train, config.launch.num_processes
    if num_processes is None:
        return
    if strategy in ("single", "dp"):
        check_one_process(strategy, num_processes)
    elif strategy in ("ddp", "fsdp") and train.exact is None:
        check_batch_sizes(train.global_batch_size, train.known_micro_batch_size, num_processes)


def check_one_process(strategy: str, num_processes: int) -> None:
    if num_processes > 1:
        raise UserError(
            f"strategy={strategy} runs in one process, not in {num_processes}; start it with "
            "`python train.py`, or use strategy=ddp"
        )


def check_batch_sizes(global_batch_size: int, micro_batch_size: int | None, num_replicas: int) -> None:
    """Raise UserError if batch sizes do not divide evenly; the message gives the nearest valid size."""
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        above = below + num_replicas
        nearest = above if below == 0 or above - global_batch_size < global_batch_size - below else below
        raise UserError(
            f"train.global_batch_size is {global_batch_size}, which is not divisible by the {num_replicas} "
            f"replicas; nearest valid value: {nearest}"
        )
    local_size = global_batch_size // num_replicas
    if micro_batch_size is not None and local_size % micro_batch_size:
        divisors = [size for size in range(1, local_size + 1) if local_size % size == 0]
        raise UserError(
            f"train.micro_batch_size is {micro_batch_size}, which does not divide the {local_size} samples "
            f"per replica (train.global_batch_size={global_batch_size}, {num_replicas} replicas); "
            f"nearest valid value: {min(divisors, key=lambda size: abs(size - micro_batch_size))}"
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
    checkpoint = config.checkpoint
    if config.strategy.name != "ddp":
        reason = f"strategy={config.strategy.name}, because each rank needs the whole model; use strategy=ddp"
    elif isinstance(config.comm, HookCommConfig):
        reason = "comm=hook, because the trainer does not know the hook's process groups; use another comm"
    elif not checkpoint.on_failure:
        reason = "checkpoint.on_failure=false, because survivors continue from what it saves; set it to true"
    elif checkpoint.remote is not None:
        reason = (
            f"checkpoint.remote={checkpoint.remote}, because the previous rank 0 may still be uploading; set "
            "checkpoint.remote=null"
        )
    else:
        return
    raise UserError(f"distributed.shrink=true is not supported with {reason}")


def _check_mps(config: Config) -> None:
    train = config.train
    if config.strategy.name != "single":
        reason = f"strategy={config.strategy.name}, because torch.distributed has no backend for MPS; use "
        reason += "strategy=single"
    elif train.exact is not None:
        reason = f"train.exact={train.exact}, because MPS has no float64; set it to null"
    elif train.micro_batch_size == "auto":
        reason = "train.micro_batch_size=auto, because the free memory of MPS is unknown; set it to a number"
    else:
        return
    raise UserError(f"distributed.device=mps is not supported with {reason}")


def _check_slurm(launch: SlurmLaunchConfig) -> None:
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
    limit_s = _seconds_of(launch.time or "0")  # 0 means no limit
    if limit_s and launch.save_before_s > limit_s - 60:
        raise UserError(
            f"launch.save_before_s is {launch.save_before_s}, but must be at least 60 s shorter than the "
            f"time limit, launch.time={launch.time} ({limit_s} s), or the run would stop before it trains; "
            "increase launch.time or decrease launch.save_before_s"
        )


def _seconds_of(time: str) -> int:
    """Return the seconds of a SLURM time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, has_days, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if has_days or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _check_exact(config: Config) -> None:
    strategy, comm, train = config.strategy, config.comm, config.train
    wire_dtype, options = getattr(comm, "wire_dtype", "fp32"), vars(strategy)
    if strategy.name not in ("single", "ddp", "fsdp"):
        reason = f"strategy={strategy.name}, because its sums depend on the number of ranks; use "
        reason += "strategy=single, ddp or fsdp"
    elif not isinstance(comm, NativeCommConfig | ScheduleCommConfig):
        reason = f"comm={comm.algorithm}, because it may not be a plain sum; use comm=native, "
        reason += ", ".join(SCHEDULES)
    elif wire_dtype != "fp32":
        reason = f"comm.wire_dtype={wire_dtype}, because gradients are sent as integers; set it to fp32"
    elif train.precision == "fp16":
        reason = "train.precision=fp16, because the loss scale depends on the ranks; use bf16 or fp32"
    elif train.compile:
        reason = "train.compile=true, because fusion differs between strategies; set it to false"
    elif options.get("sync_batchnorm"):
        reason = "strategy.sync_batchnorm=true, because its statistics depend on the ranks; set it to false, "
        reason += "and the statistics of the chunks are averaged"
    elif options.get("static_graph"):
        reason = "strategy.static_graph=true, because DDP then cannot accumulate chunks; set it to false"
    elif (group := options.get("shard_group", "world")) != "world":
        reason = f"strategy.shard_group={group}, because gradients are added in two stages; set it to world"
    elif strategy.name == "fsdp" and train.channels_last:
        reason = "train.channels_last=true, because strategy=fsdp gathers weights in another memory layout; "
        reason += "use strategy=ddp"
    elif (dtype := options.get("reduce_dtype", "fp32")) != "fp32":
        reason = f"strategy.reduce_dtype={dtype}, because integers are added; set it to fp32"
    else:
        return
    raise UserError(f"train.exact={train.exact} is not supported with {reason}")
