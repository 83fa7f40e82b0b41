"""The shell blocks of the pages are run, with steps cut. Each that cannot run here says what it needs.

`<!-- needs: ... -->` before a block: cuda, slurm, net, hosts (several), packages (an extra that `dev` lacks), or
time (minutes, even when cut).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, finish
from tests.test_docs import OTHERS, SHELL, Block, _blocks, _commands

NEEDS = {"cuda", "slurm", "net", "hosts", "packages", "time"}
_LESS = {
    r"^(--nproc.per.node|launch.processes)=4$": r"\1=2",
    r"^distributed.timeout_s=30$": "distributed.timeout_s=10",
    r"^model.width=256$": "model.width=32",
    r"^model.depth=6$": "model.depth=2",
}
_SMALL_GPT = ("model.width=32", "model.depth=1", "data.dataset.block_size=32")


def _own_files(page: Path) -> dict[str, str]:
    """The files of one's own that README.md and `page` have the reader write: text by name."""
    files = {}
    for block in _blocks("python", "yaml"):  # README.md first
        named = re.match(r"# (mine\.py|conf/\S+/mine\.yaml)\n", block.text)
        if named and block.page in (ROOT / "README.md", page):
            files[named[1]] = block.text
    return files


def _cut(words: list[str]) -> list[str]:
    """The arguments of `python`, so that little is left to do."""
    for pattern, less in _LESS.items():
        words = [re.sub(pattern, less, word) for word in words]
    if words[0] == "torchrun":
        if "-m" in words:  # a file can be forked
            at = words.index("-m")
            words[at : at + 2] = [str(ROOT / words[at + 1].replace(".", "/")) + ".py"]
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--run-path",
            "--start-method=fork",
            *words[1:],
        ]
    else:
        words = words[1:]
    if "train.py" not in words or {"--help", "--cfg"} & {*words}:
        return [str(ROOT / word) if word == "train.py" else word for word in words]
    steps = "6" if any(word.startswith("train.profile=") for word in words) else "2"
    words = [re.sub(r"start: \d+, steps: \d+", "start: 2, steps: 2", word) for word in words]
    words += [f"train.max_steps={steps}", "schedule.warmup_steps=0"]
    if "-m" in words[words.index("train.py") :]:
        words += ["hydra.sweeper.trials=2"]
    if {"model=mine", "data=mine"} & {*words}:
        words += ["--config-dir", "conf"]
    if any(word.startswith(("experiment=text_gpt", "data=text")) for word in words):
        words += [word for word in _SMALL_GPT if not any(word.split("=")[0] in other for other in words)]
    return [str(ROOT / word) if word == "train.py" else word for word in words]


# The tutorial is one session.
TUTORIAL = ROOT / "docs/tutorial.md"
_SESSION = Block(TUTORIAL, 1, "bash", "".join(block.text for block in SHELL if block.page == TUTORIAL))


def _runs() -> dict[Block, list[list[str]]]:
    """The commands of each block that are run: a beginning that an earlier block has, with the same files, is not."""
    found: dict[Block, list[list[str]]] = {}
    done = set()
    for block in [_SESSION, *(block for block in SHELL if block.needs is None and block.page != TUTORIAL)]:
        so_far = [str(_own_files(block.page))]
        for words in _commands(block):
            if words[0] not in OTHERS:  # tools of the repository, and what only looks
                so_far.append(" ".join(_cut(words)))
                if tuple(so_far) not in done:
                    found.setdefault(block, []).append(words)
                done.add(tuple(so_far))
    return found


RUNS = _runs()


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNS, ids=str)
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    for name, text in {**_own_files(block.page), "CORPUS": (ROOT / "LICENSE").read_text()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    newest = "step_00000100"
    if "runs/mine" in block.text and "run_dir=runs/mine" not in block.text:
        made = finish(str(ROOT / "train.py"), *_run_to_look_at(block.text), cwd=tmp_path)
        assert made.code == 0, made.output
        newest = max((tmp_path / "runs/mine/checkpoints").glob("step_*")).name
    for words in RUNS[block]:
        words = [word.replace("step_00000100", newest) for word in words]
        done = finish(*_cut(words), cwd=tmp_path, forks=True)
        assert done.code == 0, f"{words}\n{done.output}"


def _run_to_look_at(text: str) -> list[str]:
    """A run for a block that reads runs/mine."""
    text_model = re.search("trainer.sample|to hf", text)
    kind = ["experiment=text_gpt", *_SMALL_GPT] if text_model else re.findall(r"model=vit", text)[:1]
    best = "checkpoint.keep_best={metric: eval/loss, mode: min}"
    return ["run_dir=runs/mine", "train.max_steps=2", "schedule.warmup_steps=0", "ema.decay=0.9", best, *kind]


def test_what_a_block_needs_is_known() -> None:
    assert {block.needs for block in SHELL} - {None} <= NEEDS
    assert len(RUNS) > 30
