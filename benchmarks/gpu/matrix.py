"""Check that every strategy, precision and checkpoint format trains, saves, and resumes to the same model."""

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.day import Day, Row, quietly, settings

# parameter_server needs at least two processes with a GPU each
STRATEGIES = ("single", "dp", "ddp", "fsdp")
PRECISIONS = ("bf16", "fp32", "fp16")
CHECKPOINTS = [("full", False), ("sharded", True), ("full", True), ("sharded", False)]
MODELS = {
    "gpt": ("experiment=text_gpt", "data.dataset.block_size=64", "schedule.warmup_steps=0", "optim.lr=1e-3"),
    "resnet": ("experiment=digits_resnet", "train.channels_last=true", "schedule.warmup_steps=0"),
}
TINY = [("fsdp", "bf16", "gpt", "sharded", True)]  # the only format of fsdp


def measure(day: Day, compiled: bool = False) -> Iterator[Row]:
    from trainer.run import run

    # Compiling resnet takes minutes and tests nothing that gpt does not.
    models = ["gpt"] if compiled else list(MODELS)
    kinds = itertools.cycle(CHECKPOINTS)
    every = [
        (strategy, precision, model, *(("sharded", next(kinds)[1]) if strategy == "fsdp" else next(kinds)))
        for model, precision, strategy in itertools.product(models, PRECISIONS, STRATEGIES)
    ]
    for choice in day.size(every, TINY):
        strategy, precision, model, kind, in_background = choice
        options = (
            *MODELS[model],
            *(*f"strategy={strategy}".split(), f"train.precision={precision}", f"checkpoint={kind}"),
            *("train.max_steps=4", "train.global_batch_size=8", "train.log_every_steps=2"),
            "train.cudnn_benchmark=false",  # autotuning could choose different algorithms in the resumed run
            *(f"checkpoint.async={str(in_background).lower()}", "checkpoint.every_steps=2"),
            *(f"train.compile={str(compiled).lower()}", "checkpoint.keep_last=2"),
            *(("strategy.unit_min_params=10000",) if strategy.startswith("fsdp") else ()),
        )
        what = f"{model} {strategy} {precision} {kind}{' async' * in_background}{' compiled' * compiled}"
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            whole, again = Path(folder, "whole"), Path(folder, "again")
            try:
                config = settings(*options, f"run_dir={whole}")
                result = quietly(lambda config=config: run(config))
                shutil.copytree(whole, again, symlinks=True)
                shutil.rmtree(again / "checkpoints/step_00000004")
                config = settings(*options, f"run_dir={again}", "resume=auto")
                resumed = quietly(lambda config=config: run(config))
            except Exception as error:
                note = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
                yield Row(what, None, "", "trains, resumes", False, note)
                continue
        same = result["param_sha256"] == resumed["param_sha256"]
        near = abs(result["train/loss"] - resumed["train/loss"]) <= 0.05 * abs(result["train/loss"])
        bits = "same bits after resume" if same else "different bits after resume"
        seconds = time.perf_counter() - begin
        yield Row(what, seconds, "s", "trains, resumes", same or (day.on_gpu and near), bits)
