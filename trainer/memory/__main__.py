"""What each strategy takes of a device's memory: `python -m trainer.memory [OVERRIDES] --world 64 ...`.

Needs no GPU and none of that memory: two steps of the run itself are made on tensors that have shapes and no
numbers, as one rank of a world that is not there, and every byte they would take is counted. Without
`strategy=` in OVERRIDES, single, ddp, fsdp and hybrid (fsdp with strategy.shard_group=host) are compared, and
`strategy.NAME=VALUE` goes to those that know it.

Left out, for which `--reserve-gb` is: the CUDA context, NCCL's buffers, workspaces of kernels, and what the
allocator loses to fragments. What torch.compile saves is not known here: the steps are eager.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from functools import partial

from omegaconf import OmegaConf

from trainer.config import Config
from trainer.data.batch import BatchSplit
from trainer.errors import UserError
from trainer.launch.exits import exits
from trainer.launch.fresh import extend_path
from trainer.library import composed
from trainer.memory.fit import largest_micro_size
from trainer.memory.ledger import KINDS
from trainer.memory.rehearse import Footprint, Rehearsal, World
from trainer.overrides import CONF

STRATEGIES = {
    "single": ("strategy=single",),
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "hybrid": ("strategy=fsdp", "strategy.shard_group=host"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Do what `argv` says; ends with status 2 for a mistake."""
    extend_path()
    options = parse(argv)
    with exits():
        found = predict(options)
        print(json.dumps(found, indent=2) if options.json else table(options, found))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDES", help="as for train.py: model=gpt model.size=gpt2 ...")
    add("--world", type=int, default=8, help="ranks (8)")
    add("--per-host", type=int, default=8, help="of them on each host (8)")
    add("--rank", type=int, default=0, help="which is looked at (0: its shards are the largest)")
    add(
        "--gpu-gb",
        type=float,
        help="10^9 bytes of a device: tells which micro-batch is the largest that fits",
    )
    add("--reserve-gb", type=float, default=2.0, help="of them for what is not tensors (2)")
    add("--json", action="store_true", help="bytes, for a program")
    options = parser.parse_intermixed_args(argv)
    if not 0 < options.world <= 65536 or not options.per_host > 0:
        parser.error(
            f"--world {options.world} --per-host {options.per_host}: from 1, and at most 65536 ranks"
        )
    options.per_host = min(options.per_host, options.world)
    if options.world % options.per_host:
        parser.error(f"--per-host {options.per_host} does not divide --world {options.world}")
    if not 0 <= options.rank < options.world:
        parser.error(f"--rank {options.rank}: the ranks are 0 to {options.world - 1}")
    if options.gpu_gb is not None and not options.gpu_gb > options.reserve_gb >= 0:
        parser.error(f"--gpu-gb {options.gpu_gb} must be more than --reserve-gb {options.reserve_gb}, from 0")
    return options


def predict(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Of each strategy: bytes by kind, the peak, and what fits.

    Raises:
        UserError: as of the run that the overrides describe.
    """
    configs = _configs(options.overrides)
    rehearsal = Rehearsal(next(iter(configs.values())))
    found: dict[str, dict[str, object]] = {}
    for name, config in configs.items():
        alone = config.strategy.name in ("single", "dp")
        world = World(1, 1) if alone else World(options.world, options.per_host, options.rank)
        split = _split(config, world.size, options.world)
        with rehearsal.under(config, world) as stage:
            tried = functools.cache(partial(stage.footprint, accumulation=split.accumulation))
            found[name] = _row(tried(split.micro_size), split)
            if options.gpu_gb is not None:
                budget = round((options.gpu_gb - options.reserve_gb) * 1e9)
                peak = partial(_peak, tried)
                found[name]["largest_micro_batch"] = largest_micro_size(peak, budget, split.micro_size)
    return {"parameters": {"number": rehearsal.num_parameters}, **found}


def _peak(tried: Callable[[int], Footprint], micro_size: int) -> int:
    return tried(micro_size).peak


def _row(footprint: Footprint, split: BatchSplit) -> dict[str, object]:
    return {
        **dataclasses.asdict(footprint),
        "micro_batch": split.micro_size,
        "accumulation": split.accumulation,
    }


def _split(config: Config, replicas: int, world: int) -> BatchSplit:
    """The micro-batch that the run would have on all the ranks, also where one process is looked at."""
    size = config.train.global_batch_size
    micro = config.train.micro_batch_size or max(1, size // world)
    return BatchSplit(size, replicas, micro, max(1, size // replicas // micro))


def _configs(overrides: list[str]) -> dict[str, Config]:
    """By name of the strategy; each is given those overrides of strategy.* that it knows."""
    if any(override.startswith("strategy=") for override in overrides):
        config = composed(overrides)
        return {config.strategy.name: config}
    own = [override for override in overrides if override.startswith("strategy.")]
    others = [override for override in overrides if override not in own]
    used: set[str] = set()
    configs = {}
    for name, choice in STRATEGIES.items():
        known = OmegaConf.load(CONF / "strategy" / f"{choice[0].partition('=')[2]}.yaml")
        fitting = [each for each in own if each.partition(".")[2].partition("=")[0] in known]
        used.update(fitting)
        configs[name] = composed([*others, *choice, *fitting])
    if unknown := set(own) - used:
        raise UserError(f"{sorted(unknown)[0]} is no setting of {', '.join(STRATEGIES)}")
    return configs


def table(options: argparse.Namespace, found: dict[str, dict[str, object]]) -> str:
    """For a person: GB of one rank."""
    number = found["parameters"]["number"]
    rows = {name: row for name, row in found.items() if name != "parameters"}
    shown = [kind for kind in KINDS if any(row["parts"][kind] for row in rows.values())]  # type: ignore[index]
    host = ["on the host"] if any(row["host"] for row in rows.values()) else []
    heads = ["GB at the peak of a step", *shown, "sum", *host, "at start", "micro-batch"]
    if options.gpu_gb is not None:
        heads.append(f"fits {options.gpu_gb:g} GB")
    lines = [heads]
    for name, row in rows.items():
        parts: dict[str, int] = row["parts"]  # type: ignore[assignment]
        times = f" x {row['accumulation']}" if row["accumulation"] != 1 else ""
        line = [name, *(_gb(parts[kind]) for kind in shown), _gb(row["peak"])]
        line += [*(_gb(row["host"]) for _ in host), _gb(row["start"])]
        line.append(f"{row['micro_batch']}{times}")
        if options.gpu_gb is not None:
            line.append(str(row["largest_micro_batch"] or "nothing"))
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    where = f"rank {options.rank} of {options.world}, {options.per_host} a host"
    kept = f"; {options.reserve_gb:g} GB kept free" if options.gpu_gb is not None else ""
    return "\n".join([f"{number:,} parameters; {where}{kept}", *text])


def _gb(num_bytes: object) -> str:
    assert isinstance(num_bytes, int)
    return f"{num_bytes / 1e9:.3f}" if num_bytes < 10e9 else f"{num_bytes / 1e9:.1f}"


if __name__ == "__main__":
    main()
