"""Evaluate a trained model: `python -m trainer.evaluate RUN [--checkpoint newest|best|PATH] [OVERRIDES]`.

Writes RUN/evaluation.json with metrics as in result.json (eval/*), the checkpoint and the number of samples.
Each validation sample counts once. Runs in one process, under torchrun or with launch=local
launch.processes=N, even while RUN is still training. With the world size and strategy of the run, the metrics
are bit-identical to those of the run's own evaluation.
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
        result = evaluate(config, options.checkpoint)
        if result is not None:
            print(json.dumps(result, indent=2))

    start("trainer.evaluate", arguments("trainer.evaluate", __doc__), do)


def evaluate(config: Config, checkpoint: str = "newest") -> dict[str, Any] | None:
    """Evaluate a checkpoint and write evaluation.json (a collective).

    Returns:
        The contents of evaluation.json on rank 0; None on other ranks.
    """
    from trainer import evaluation
    from trainer.distributed.agreement import on_main
    from trainer.inference.restore import evaluates_ema, held_out, restored_run, with_progress

    config.train.eval_every_epochs = config.train.eval_every_epochs or 1  # requires a task that can evaluate
    with restored_run(config, checkpoint) as restored:
        _, loader = held_out(restored)
        metrics = {"eval/": evaluation.evaluate(restored, with_progress(restored, loader)).metrics}
        if config.ema.decay is not None and not evaluates_ema(config):
            restored.take_averages()
            metrics["eval/ema/"] = evaluation.evaluate(restored, with_progress(restored, loader)).metrics
        result = {
            "checkpoint": str(restored.checkpoint.directory),
            "step": restored.checkpoint.progress.step,
            "strategy": config.strategy.name,
            "world_size": restored.ranks.world_size,
            "samples": loader.num_samples and loader.num_samples - loader.num_skipped,  # null for a stream
            **{
                f"{prefix}{name}": value
                for prefix, by_name in metrics.items()
                for name, value in by_name.items()
            },
        }
        path = location(config.run_dir or "") / "evaluation.json"
        on_main(lambda: _write(path, result), restored.ranks)
    return result if restored.ranks.is_main else None


def _write(path: Location, result: dict[str, Any]) -> None:
    data = (json.dumps(result, indent=2) + "\n").encode()
    if isinstance(path, Address):
        path.write(data)
        return
    with output_file(path, replace=True) as file:
        file.write(data)


if __name__ == "__main__":
    main()
