"""Train two models with train.exact on 1, 2, 3 and 4 ranks, and compare the hashes.

    python -m benchmarks.same_bits
    ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.same_bits     like a CPU without AVX-512

Prints the environment that determines the bits in addition to the settings (CPU, torch's build, threads); the
hash of each model for each number of ranks; the hash of an MLP whose ranks are all killed, and which runs on
8, 5 and 3 ranks with DDP and on 8 with FSDP in turn; and the hashes without train.exact. The exit status is 1
if hashes differ that must be equal.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.failure_parts import inject
from tests.programs import finish_ranks
from trainer.exact.environment import environment, prepare

EXACT = ("train.exact=8",)
MODELS = {
    "mlp": ("train.global_batch_size=48", "optim=adamw", "optim.lr=0.001", "train.max_steps=100"),
    "gpt": (
        *("data=text", "model=gpt", "model.width=64", "model.depth=2", "model.num_heads=4", "optim=adamw"),
        *("optim.lr=0.001", "data.dataset.block_size=64", "train.global_batch_size=16", "train.max_steps=60"),
    ),
}
RANKS = {"mlp": ("single 1", "ddp 2", "ddp 3", "ddp 4", "fsdp 4"), "gpt": ("single 1", "ddp 3", "fsdp 2")}
SCHEDULE = (
    ("ddp", 8, 25),
    ("ddp", 5, 50),
    ("ddp", 3, 75),
    ("fsdp", 8, 100),
)  # strategy, number of ranks, last step


def run(run_dir: Path, model: str, strategy: str, ranks: int, *more: str, dies: bool = False) -> None:
    """Train to the end, or until all ranks have died."""
    words = ["train.eval_every_epochs=0", "checkpoint.every_epochs=null", "train.log_every_steps=1"]
    words += [*MODELS[model], f"strategy={strategy}", "logger=jsonl", f"run_dir={run_dir}", *more]
    ended = finish_ranks(ranks, "train.py", *words)
    if any(rank.code for rank in ended) is not dies:
        raise RuntimeError("\n".join(rank.output for rank in ended))


def hash_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


def hashes_by_ranks(folder: Path, model: str, *more: str) -> dict[str, str]:
    """Return the hash of a model by strategy and number of ranks."""
    found = {}
    for words in RANKS[model]:
        strategy, ranks = words.split()
        run_dir = folder / f"{model}-{words}-{len(more)}"
        run(run_dir, model, strategy, int(ranks), *more)
        found[f"{strategy} on {ranks}"] = hash_of(run_dir)
    return found


def schedule(run_dir: Path) -> str:
    """Return the hash of an MLP whose ranks are killed, and which resumes on other numbers of ranks."""
    for strategy, ranks, last in SCHEDULE:
        dies = last != SCHEDULE[-1][-1]
        how = inject("kill", 0, last + 1, "data", count=ranks) if dies else ()
        saves = ("resume=auto", "checkpoint.every_steps=25")
        run(run_dir, "mlp", strategy, ranks, *EXACT, *saves, *how, dies=dies)
    return hash_of(run_dir)


def main() -> bool:
    prepare(torch.device("cpu"))
    for name, value in environment(torch.device("cpu")).items():
        print(f"{name}: {value}")
    same = True
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        folder = Path(name)
        for model in MODELS:
            found = hashes_by_ranks(folder, model, *EXACT)
            if model == "mlp":
                words = ", ".join(f"{strategy} on {ranks}" for strategy, ranks, _ in SCHEDULE)
                found[f"killed and resumed: {words}"] = schedule(folder / "schedule")
            same = print_hashes(model, found) and same
        print_hashes("mlp, without train.exact", hashes_by_ranks(folder, "mlp"))
    print("the same bits" if same else "DIFFERENT bits")
    return same


def print_hashes(model: str, found: dict[str, str]) -> bool:
    """Print the hashes, and return whether all are equal."""
    for sha256 in dict.fromkeys(found.values()):
        where = "; ".join(words for words, value in found.items() if value == sha256)
        print(f"{model}: {where}: {sha256[:16]}", flush=True)
    return len(set(found.values())) == 1


if __name__ == "__main__":
    sys.exit(not main())
