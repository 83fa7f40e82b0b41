"""What a run is about to do, as a table: printed before its first step."""

from collections import Counter
from collections.abc import Sequence

from trainer.context import Run
from trainer.distributed import backend_flags
from trainer.optim.param_groups import described
from trainer.run_dir.console import table


def start_table(run: Run) -> str:
    config = run.config
    ranks, train_loader, held_out = run.ranks, run.data.train_loader, run.data.eval_loader
    steps_per_epoch = "an unknown number" if (steps := train_loader.steps_per_epoch) is None else f"{steps:,}"
    processes = f"{layout(ranks.hosts)} processes"
    return table(
        {
            "strategy": f"{config.strategy.name}, comm {run.strategy.algorithm}",
            "hosts": f"{processes} on {ranks.device.type}, {ranks.backend}",
            "precision": backend_flags.described(config.train, ranks.device),
            "model": f"{config.model['_target_']}, {run.plan.num_parameters:,} parameters",
            "data": f"{config.data.dataset['_target_']}, {_samples(train_loader.num_samples)}"
            + (f"; held out: {_samples(held_out.num_samples)}" if held_out else ""),
            "optim": _optimizer_words(run),
            **described(run.state.optimizer, run.state.trainable),
            "batch": str(run.data.split),
            **_leaves(run),
            "steps": f"{run.plan.total_steps:,}, {steps_per_epoch} an epoch, from {run.plan.steps_before:,}",
            "seed": str(config.seed),
            "run": str(config.run_dir),
        }
    )


def layout(hosts: Sequence[int]) -> str:
    """Hosts and ranks of each, from the host of every rank: 2 x 4, or 2 + 1 if hosts differ."""
    sizes = list(Counter(hosts).values())
    alike = len(set(sizes)) == 1
    return f"{len(sizes)} x {sizes[0]}" if alike else " + ".join(map(str, sizes))


def _leaves(run: Run) -> dict[str, str]:
    if (exact := run.plan.exact) is None:
        return {}
    each, more = divmod(exact["leaves"], run.data.split.num_replicas)
    words = f"{exact['leaves']} chunks, {each}{f' or {each + 1}' if more else ''} a rank"
    return {"exact": words + (f", since step {exact['since']:,}" if exact["since"] else "")}


def _optimizer_words(run: Run) -> str:
    trained = sum(parameter.numel() for parameter in run.state.trainable.whole.values())
    frozen = run.plan.num_parameters - trained
    return f"{run.config.optim['_target_']}{f', {frozen:,} parameters frozen' * (frozen > 0)}"


def _samples(number: int | None) -> str:
    return "a stream" if number is None else f"{number:,} samples"
