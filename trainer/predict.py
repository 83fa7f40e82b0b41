"""Write a trained model's predictions for validation samples: `python -m trainer.predict RUN --out FILE`.

FILE ends in .csv, .jsonl or .pt and is created atomically at the end. It contains a row for each validation
sample, in the order of the dataset: the index of the sample, the name of its input if the dataset has names,
and the task's predictions. Runs in one process, under torchrun or with launch=local launch.processes=N, even
while RUN is still training.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.errors import UserError
from trainer.files.writing import check_free, output_file
from trainer.inference.command import arguments, start
from trainer.launch.rank_info import rank_info


def main() -> None:
    parser = arguments("trainer.predict", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file; must not exist")

    def do(options: Any, config: Config) -> None:
        predict(config, options.out, options.checkpoint)

    start("trainer.predict", parser, do)


def predict(config: Config, out: Path, checkpoint: str = "newest") -> None:
    """Write the predictions of a checkpoint to `out` (a collective)."""
    if rank_info(config.distributed).rank == 0:
        check_free(out)
    import torch  # after the check, so that its error comes at once

    from trainer import evaluation
    from trainer.inference.prediction_file import writer_for
    from trainer.inference.restore import held_out, restored_run, with_progress
    from trainer.tasks import offers

    write = writer_for(out)
    with restored_run(config, checkpoint) as restored, ExitStack() as stack:
        if not offers(restored.task, "predict"):
            raise UserError(
                f"data.task={config.data.task['_target_']} cannot make predictions, because it has no "
                "`predict` method (see trainer.tasks.Task)"
            )
        dataset, loader = held_out(restored, by_chunks=False)
        file = stack.enter_context(output_file(out)) if restored.ranks.is_main else None
        batches = list(filter(None, evaluation.predict(restored, with_progress(restored, loader))))
        if file is not None:
            indices = [index for batch_indices, _ in batches for index in batch_indices]
            columns: dict[str, Any] = {"index": torch.tensor(indices)}
            if (name_of := _names(dataset)) is not None:
                columns["input"] = list(map(name_of, indices))
            for name in batches[0][1]:
                columns[name] = torch.cat([rows[name] for _, rows in batches])
            write(file, columns)


def _names(dataset: Any) -> Callable[[int], Any] | None:
    """Return a function that returns the name or path of a sample's input; None if there are no names."""
    from torch.utils.data import Subset

    if isinstance(dataset, Subset):
        inner = _names(dataset.dataset)
        return inner and (lambda index: inner(dataset.indices[index]))
    if hasattr(dataset, "name_of"):
        return dataset.name_of
    if isinstance(getattr(dataset, "samples", None), list):  # torchvision's folders: (path, class)
        return lambda index: dataset.samples[index][0]
    return None


if __name__ == "__main__":
    main()
