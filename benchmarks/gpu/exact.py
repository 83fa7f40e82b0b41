"""Check that train.exact gives the same bits again and with each strategy on a GPU; measure its cost."""

import tempfile
from collections.abc import Iterator

from benchmarks.gpu.day import Day, Row, contexts, in_turns, quietly, ratio, settings, steps

MODELS = {
    "gpt": ("experiment=text_gpt", "data.dataset.block_size=64", "schedule.warmup_steps=0"),
    "resnet": ("experiment=digits_resnet", "schedule.warmup_steps=0"),
}
STRATEGIES = (
    "single",
    "single",
    "ddp",
    "fsdp",
)  # the first one twice, because kernels may not be deterministic
COMMON = ("train.log_every_steps=5", "train.clip_grad_norm=1")


def measure(day: Day) -> Iterator[Row]:
    from trainer.run import run

    strategies = day.size(STRATEGIES, ("single", "fsdp"))
    common = (*COMMON, f"train.global_batch_size={day.size(64, 16)}")
    for model in day.size(list(MODELS), ["gpt"]):
        hashes = []
        for strategy in strategies:
            with tempfile.TemporaryDirectory() as run_dir:
                options = (*MODELS[model], *common, f"strategy={strategy}", "train.exact=8")
                config = settings(*options, f"train.max_steps={day.size(20, 2)}", f"run_dir={run_dir}")
                hashes.append(quietly(lambda config=config: run(config))["param_sha256"])
        found = f"{len(set(hashes))} hash(es) with {', '.join(strategies)}"
        yield Row(f"{model} exact", float(len(set(hashes))), "", "one hash", len(set(hashes)) == 1, found)
    with contexts() as context:
        words = (*MODELS["gpt"], *common, "train.max_steps=100000")
        ways = {
            "exact": steps(context(*words, "train.exact=8")),
            "without": steps(context(*words, "train.micro_batch_size=8")),
        }
        found = in_turns(day, ways, *day.size((5, 20), (1, 1)))
    cost = 1 / ratio(found["exact"], found["without"])
    yield Row(
        "gpt exact / not exact, same micro-batches", cost, "x", "<= 1.15", cost <= 1.15 or not day.on_gpu
    )
