"""Predict how much memory each strategy needs: `python -m planner.memory [OVERRIDES] --world 64 ...`.

The program needs neither a GPU nor that much memory: it runs two steps on fake tensors, which have shapes but
no data, as one rank of a simulated world, and counts the bytes of these tensors. Without `strategy=` in
OVERRIDES, it compares all strategies, including hybrid (fsdp with strategy.shard_group=host); an override
`strategy.NAME=VALUE` then applies to the strategies that have this setting.

With parameter_server, there is a line for a server and one for a worker. nn.DataParallel on several GPUs is
not supported.

`--reserve-gb` must cover what is not counted: the CUDA context, NCCL's buffers, workspaces of kernels,
fragmentation of the allocator, and the messages of comm=ring and similar algorithms. The model is not
compiled, even with train.compile=true.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from functools import partial

from omegaconf import OmegaConf

from planner.dry_run import DryRun, Footprint, Stage
from planner.fit import MOST, largest_micro_batch_size
from planner.ledger import KINDS
from planner.pretend import DryRunWorld
from trainer.api import composed, search_path
from trainer.config import Config, ParameterServerConfig
from trainer.config.overrides import CONF
from trainer.data.loading.batch import BatchSplit
from trainer.errors import UserError
from trainer.launch.exits import exits
from trainer.launch.new_process import extend_path

Row = dict[str, object]
STRATEGIES = {
    "single": ("strategy=single",),
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "hybrid": ("strategy=fsdp", "strategy.shard_group=host"),
    "parameter_server": ("strategy=parameter_server",),
}


def main(argv: Sequence[str] | None = None) -> None:
    extend_path()
    options = parse(argv)
    with exits():
        rows = predict(options)
        print(json.dumps(rows, indent=2) if options.json else table(options, rows))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m planner.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDES", help="as for train.py: model=gpt model.size=gpt2 ...")
    add(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="your own folder structured like conf/",
    )
    add("--world", type=int, default=8, help="number of ranks (default: 8)")
    add("--per-host", type=int, default=8, help="ranks on each host (default: 8)")
    add("--rank", type=int, help="the rank to simulate (default: 0, which has the largest shards)")
    add(
        "--gpu-gb",
        type=float,
        help="memory of a device in 10^9 bytes; prints the largest micro-batch that fits",
    )
    add("--reserve-gb", type=float, default=2.0, help="part of --gpu-gb that is not for tensors (default: 2)")
    add("--json", action="store_true", help="print bytes as JSON")
    options = parser.parse_intermixed_args(argv)
    if not 0 < options.world <= 65536 or not options.per_host > 0:
        parser.error(
            f"--world {options.world} --per-host {options.per_host}: expected from 1 to 65536 ranks, and at "
            "least 1 per host"
        )
    options.per_host = min(options.per_host, options.world)
    if options.world % options.per_host:
        parser.error(f"--world {options.world} is not divisible by --per-host {options.per_host}")
    if not 0 <= (options.rank or 0) < options.world:
        parser.error(f"--rank {options.rank}: expected a rank from 0 to {options.world - 1}")
    if options.gpu_gb is not None and not 1e6 >= options.gpu_gb > options.reserve_gb >= 0:
        parser.error(
            f"--gpu-gb {options.gpu_gb} must exceed --reserve-gb {options.reserve_gb}, and both must be from "
            "0 to 1e6"
        )
    return options


def predict(options: argparse.Namespace) -> dict[str, Row]:
    """Return, for each strategy, bytes by kind, the peak, and the largest micro-batch; or its error.

    Raises:
        UserError: if no strategy supports the run.
    """
    rows: dict[str, Row] = {}
    refused: dict[str, UserError] = {}
    dry_run: DryRun | None = None
    choices = _choices([*options.overrides, *search_path(options.config_dir)])
    for name, overrides in choices.items():
        try:
            config = composed(overrides)
            dry_run = dry_run or DryRun(config)
            rows |= _rows(options, name or config.strategy.name, config, dry_run)
        except UserError as error:
            refused[name] = error
    if len(refused) == len(choices):
        raise next(iter(refused.values()))
    assert dry_run is not None
    model: dict[str, Row] = {"parameters": {"number": dry_run.num_parameters}}
    errors: dict[str, Row] = {"refused": {name: str(error) for name, error in refused.items()}}
    return model | rows | (errors if refused else {})


def _rows(options: argparse.Namespace, strategy: str, config: Config, dry_run: DryRun) -> dict[str, Row]:
    """Return the rows of a strategy by name: one for each role and device."""
    rows: dict[str, Row] = {}
    for part, rank in _ranks(options, config).items():
        world = DryRunWorld(1 if _is_one_process(config) else options.world, options.per_host, rank)
        with dry_run.under(config, world) as stage:
            split = _split(options, config, stage)
            footprints = functools.cache(partial(stage.footprints, accumulation=split.accumulation))
            fits: Row = {}
            if options.gpu_gb is not None:
                budget = round((options.gpu_gb - options.reserve_gb) * 1e9)
                largest = largest_micro_batch_size(partial(_peak, footprints), budget, split.micro_batch_size)
                fits = {"largest_micro_batch": largest}
            for device, footprint in footprints(split.micro_batch_size).items():
                name = ", ".join(filter(None, (strategy, part, device)))
                rows[name] = _row(footprint, split if stage.trains else None) | fits
    return rows


def _is_one_process(config: Config) -> bool:
    return config.strategy.name in ("single", "dp")


def _ranks(options: argparse.Namespace, config: Config) -> dict[str, int]:
    """Return the ranks to simulate by role; the role is "" if there is only one."""
    settings = config.strategy
    if options.rank is None and isinstance(settings, ParameterServerConfig) and settings.servers != "all":
        return {"server": 0, "worker": min(int(settings.servers), options.world - 1)}
    return {"": 0 if _is_one_process(config) else options.rank or 0}


def _peak(footprints: Callable[[int], dict[str, Footprint]], micro_batch_size: int) -> int:
    return max(footprint.peak for footprint in footprints(micro_batch_size).values())


def _row(footprint: Footprint, split: BatchSplit | None) -> Row:
    return {
        **dataclasses.asdict(footprint),
        "micro_batch": split.micro_batch_size if split else None,
        "accumulation": split.accumulation if split else None,
    }


def _split(options: argparse.Namespace, config: Config, stage: Stage) -> BatchSplit:
    """Return the split of the batch over all ranks, even for a strategy that uses one process."""
    size, replicas = config.train.global_batch_size, stage.num_replicas
    num_parts = options.world if _is_one_process(config) else replicas
    if config.train.exact is not None:
        chunks = config.train.exact
        return BatchSplit(size, replicas, max(1, size // chunks), -(-chunks // replicas))
    micro = config.train.known_micro_batch_size or max(1, size // num_parts)
    return BatchSplit(size, replicas, micro, max(1, size // replicas // micro))


def _choices(overrides: list[str]) -> dict[str, list[str]]:
    """Return the overrides for each strategy, without strategy.* settings that it lacks."""
    if any(override.startswith("strategy=") for override in overrides):
        return {"": overrides}
    of_strategy = [override for override in overrides if override.startswith("strategy.")]
    others = [override for override in overrides if override not in of_strategy]
    used: set[str] = set()
    choices = {}
    for name, choice in STRATEGIES.items():
        known = OmegaConf.load(CONF / "strategy" / f"{choice[0].partition('=')[2]}.yaml")
        fitting = [each for each in of_strategy if each.partition(".")[2].partition("=")[0] in known]
        used.update(fitting)
        choices[name] = [*others, *choice, *fitting]
    if unknown := set(of_strategy) - used:
        raise UserError(f"{sorted(unknown)[0]} is not a setting of {', '.join(STRATEGIES)}")
    return choices


def table(options: argparse.Namespace, prediction: dict[str, Row]) -> str:
    """Return a table of the memory of one rank in GB."""
    number = prediction["parameters"]["number"]
    rows = {name: row for name, row in prediction.items() if "peak" in row}
    shown = [kind for kind in KINDS if any(row["parts"][kind] for row in rows.values())]  # type: ignore[index]
    host = ["on the host"] if any(row["host"] for row in rows.values()) else []
    heads = ["GB at the peak of a step", *shown, "sum", *host, "at start", "micro-batch"]
    if options.gpu_gb is not None:
        heads.append(f"fits {options.gpu_gb:g} GB")
    lines = [heads]
    for name, row in rows.items():
        parts: dict[str, int] = row["parts"]  # type: ignore[assignment]
        line = [name, *(_gb(parts[kind]) for kind in shown), _gb(row["peak"])]
        line += [*(_gb(row["host"]) for _ in host), _gb(row["start"])]
        times = f" x {row['accumulation']}" if row["accumulation"] != 1 else ""
        line.append(f"{row['micro_batch']}{times}" if row["micro_batch"] is not None else "-")
        if options.gpu_gb is not None:
            largest = row["largest_micro_batch"]
            line.append({0: "nothing", MOST: "any"}.get(largest, str(largest)))  # type: ignore[call-overload]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    where = f"rank {options.rank or 0} of {options.world}, {options.per_host} per host"
    reserve = f"; {options.reserve_gb:g} GB reserved" if options.gpu_gb is not None else ""
    refused = [f"{name}: {why}" for name, why in prediction.get("refused", {}).items()]
    return "\n".join([f"{number:,} parameters, not compiled; {where}{reserve}", *text, *refused])


def _gb(num_bytes: object) -> str:
    assert isinstance(num_bytes, int)
    return f"{num_bytes / 1e9:.3f}" if num_bytes < 10e9 else f"{num_bytes / 1e9:.1f}"


if __name__ == "__main__":
    main()
