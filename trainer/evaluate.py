"""Evaluate a trained model: `python -m trainer.evaluate RUN [--checkpoint newest|best|PATH] [OVERRIDES]`.

Writes RUN/evaluation.json: eval/* as in result.json, each held-out sample counted once, and its origin.
Runs alone, under torchrun or with launch=local launch.processes=N, and also while RUN still trains. With the
world size and strategy of the run its metrics equal those of the run's own evaluation, to the bit.
"""

import json
from typing import Any

from trainer.config import Config
from trainer.files.address import Address, Location, location
from trainer.files.writing import output_file
from trainer.inference.command import arguments, start


def main() -> None:
    """Run the command line `sys.argv`, and print the contents of evaluation.json."""

    def do(options: Any, config: Config) -> None:
        found = evaluate(config, options.checkpoint)
        if found is not None:
            print(json.dumps(found, indent=2))

    start("trainer.evaluate", arguments("trainer.evaluate", __doc__), do)


def evaluate(config: Config, checkpoint: str = "newest") -> dict[str, Any] | None:
    """Return the contents of evaluation.json on rank 0; None on others (a collective of all ranks).

    Args:
        config: the `saved_settings` of the run.

    Raises:
        UserError: the checkpoint or held-out data does not exist; or settings do not fit.
    """
    from trainer import evaluation
    from trainer.distributed.agreement import on_main
    from trainer.inference.restore import evaluates_ema, held_out, restored_run, with_progress

    config.train.eval_every_epochs = config.train.eval_every_epochs or 1  # so that the task must evaluate
    with restored_run(config, checkpoint) as restored:
        _, loader = held_out(restored)
        metrics = {"eval/": evaluation.evaluate(restored, with_progress(restored, loader)).metrics}
        if config.ema.decay is not None and not evaluates_ema(config):
            restored.take_averages()
            metrics["eval/ema/"] = evaluation.evaluate(restored, with_progress(restored, loader)).metrics
        found = {
            "checkpoint": str(restored.checkpoint.directory),
            "step": restored.checkpoint.progress.step,
            "strategy": config.strategy.name,
            "world_size": restored.ranks.world_size,
            "samples": loader.num_samples and loader.num_samples - loader.num_skipped,  # null for a stream
            **{f"{of}{name}": value for of, those in metrics.items() for name, value in those.items()},
        }
        path = location(config.run_dir or "") / "evaluation.json"
        on_main(lambda: _write(path, found), restored.ranks)
    return found if restored.ranks.is_main else None


def _write(path: Location, found: dict[str, Any]) -> None:
    data = (json.dumps(found, indent=2) + "\n").encode()
    if isinstance(path, Address):
        path.write(data)
        return
    with output_file(path, replace=True) as file:
        file.write(data)


if __name__ == "__main__":
    main()
