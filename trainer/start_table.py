"""The table of settings and facts that a run prints before its first step."""

from collections import Counter
from collections.abc import Sequence

from trainer.context import Run
from trainer.distributed import backend_flags
from trainer.optim.param_groups import described
from trainer.run_dir.console import table


def start_table(run: Run) -> str:
    """Return the table as text, with a setting or fact per line."""
    config, ranks, algorithm = run.config, run.ranks, run.strategy.algorithm
    return table(
        {
            "processes": f"{layout(ranks.hosts)} ({ranks.device.type}, {ranks.backend})",
            **_shared_gpu(run),
            "strategy": config.strategy.name
            + ("" if algorithm == "native" else f" (all-reduce: {algorithm})"),
            "precision": backend_flags.described(config.train, ranks.device),
            "model": f"{config.model['_target_']}, {run.plan.num_parameters:,} parameters",
            "data": _data(run),
            "optimizer": _optimizer(run),
            **described(run.state.optimizer, run.state.trainable),
            "batch": str(run.data.split),
            **_exact(run),
            "steps": _steps(run),
            "seed": str(config.seed),
            "run dir": str(config.run_dir),
        }
    )


def layout(hosts: Sequence[int]) -> str:
    """Describe how processes are divided among hosts, such as "8 on 2 hosts" or "3 on 2 hosts (2 + 1)"."""
    sizes = list(Counter(hosts).values())
    words = f"{len(hosts)} on {len(sizes)} host{'s' * (len(sizes) > 1)}"
    return words if len(set(sizes)) == 1 else f"{words} ({' + '.join(map(str, sizes))})"


def _shared_gpu(run: Run) -> dict[str, str]:
    if (number := run.ranks.ranks_per_gpu) == 1:
        return {}
    return {"shared GPU": f"{number} ranks on each GPU, so the speed is not that of separate GPUs"}


def _data(run: Run) -> str:
    train, held_out = run.data.train_loader.num_samples, run.data.eval_loader
    words = "a stream" if train is None else f"{train:,} training"
    if held_out is not None:
        number = held_out.num_samples
        words += ", a validation stream" if number is None else f", {number:,} validation"
    return f"{run.config.data.dataset['_target_']}: {words}" + (" samples" if train is not None else "")


def _optimizer(run: Run) -> str:
    trainable = sum(parameter.numel() for parameter in run.state.trainable.whole.values())
    frozen = run.plan.num_parameters - trainable
    return f"{run.config.optim['_target_']}{f', {frozen:,} parameters frozen' * (frozen > 0)}"


def _exact(run: Run) -> dict[str, str]:
    if (exact := run.plan.exact) is None:
        return {}
    each, more = divmod(exact["leaves"], run.data.split.num_replicas)
    words = f"{exact['leaves']} chunks, {each}{f' or {each + 1}' if more else ''} per rank"
    return {"exact": words + (f", since step {exact['since']:,}" if exact["since"] else "")}


def _steps(run: Run) -> str:
    total, before = run.plan.total_steps, run.plan.steps_before
    per_epoch = run.data.train_loader.steps_per_epoch
    words = f"{total:,}"
    if per_epoch is not None:
        epochs, rest = divmod(total, per_epoch)
        of_epochs = f"{epochs} epoch{'s' * (epochs > 1)} x {per_epoch:,}"
        words += f" ({per_epoch:,} per epoch)" if rest or not epochs else f" ({of_epochs})"
    return words + (f", resumed after step {before:,}" if before else "")
