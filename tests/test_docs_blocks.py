"""Run the shell blocks of the pages, with fewer steps. Blocks with special requirements state them.

`<!-- needs: ... -->` before a block: cuda, slurm, net, hosts (several), packages (an extra that `dev` lacks),
or time (minutes, even when cut). A run that only sets what conf/ has is composed, by tests/test_docs.py; it
trains where README.md has it, or where a later command reads it.
"""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest

from tests.programs import ROOT, finish
from tests.test_docs import OTHERS, SHELL, Block, _blocks, _commands

README, TUTORIAL = ROOT / "README.md", ROOT / "docs/tutorial.md"
NEEDS = {"cuda", "slurm", "net", "hosts", "packages", "time"}
_LESS = {
    r"^(--nproc.per.node|launch.processes)=4$": r"\1=2",
    r"^distributed.timeout_s=30$": "distributed.timeout_s=10",
    r"^model.width=256$": "model.width=32",
    r"^model.depth=6$": "model.depth=2",
}
_SMALL_GPT = ("model.width=32", "model.depth=1", "data.dataset.block_size=32")


def _own_files(page: Path) -> dict[str, str]:
    """Return the files that the tutorial and then `page` tell the reader to write."""
    files: dict[str, str] = {}
    for source in (TUTORIAL, page):
        written: dict[str, str] = {}
        for block in _blocks("python", "yaml"):
            named = re.match(r"# (mine\.py|conf/\S+/mine\.yaml)\n", block.text)
            if named and block.page == source:
                written[named[1]] = written.get(named[1], "") + block.text
        files |= written
    return files


def _cut(words: list[str]) -> list[str]:
    """Return the arguments of `python`, shortened to few steps."""
    for pattern, less in _LESS.items():
        words = [re.sub(pattern, less, word) for word in words]
    if words[0] == "torchrun":
        if "-m" in words:  # a file can be forked
            at = words.index("-m")
            words[at : at + 2] = [str(ROOT / words[at + 1].replace(".", "/")) + ".py"]
        forked = ("--standalone", "--run-path", "--start-method=fork")
        words = ["-m", "torch.distributed.run", *forked, *words[1:]]
        words += ["--sizes", "4000"] * any(word.endswith("benchmarks/allreduce.py") for word in words)
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
_SESSION = Block(TUTORIAL, 1, "bash", "".join(block.text for block in SHELL if block.page == TUTORIAL))


def _only_sets(words: list[str]) -> bool:
    """Return whether composing the settings is a sufficient test."""
    own = any("=mine." in word for word in words)  # a class in the reader's own file
    return "train.py" in words and not own and not {"--help", "--cfg"} & {*words}


def _makes(words: list[str]) -> set[str]:
    """Return the directory of its run or sweep."""
    return {word.partition("=")[2] for word in words if word.startswith(("run_dir=", "hydra.sweep.dir="))}


def _runs() -> dict[Block, list[list[str]]]:
    """Return the commands of each block that are run: each once, unless it creates a run that others read."""
    found: dict[Block, list[list[str]]] = {}
    done: list[list[str]] = []
    for block in [*(block for block in SHELL if block.needs is None and block.page != TUTORIAL), _SESSION]:
        # Without tools of the repository, and what only looks.
        commands = [words for words in _commands(block) if words[0] not in OTHERS]
        wanted = [words for words in commands if block.page == README or not _only_sets(words)]
        wanted = [words for words in wanted if words not in done]
        done += wanted
        read = {word for words in wanted for word in words}
        if chosen := [words for words in commands if words in wanted or _makes(words) & read]:
            found[block] = chosen
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
    """Create a run for a block that reads runs/mine."""
    text_model = re.search("trainer.sample|to hf", text)
    kind = ["experiment=text_gpt", *_SMALL_GPT] if text_model else re.findall(r"model=vit", text)[:1]
    best = "checkpoint.keep_best={metric: eval/loss, mode: min}"
    return ["run_dir=runs/mine", "train.max_steps=2", "schedule.warmup_steps=0", "ema.decay=0.9", best, *kind]


@pytest.mark.slow
@pytest.mark.parametrize("service", ["SKYPILOT", "DSTACK"])
def test_the_command_for_a_cloud_runs(service: str, tmp_path: Path) -> None:
    """Uses the service's variables for one node, without GPUs and bucket."""
    (text,) = (b.text for b in _blocks("yaml") if b.page.name == "clouds.md" and service in b.text)
    command = re.sub(r"\$\([^)]*\)", "127.0.0.1", text[text.index("torchrun ") :].partition("\nresources")[0])
    command = command.replace("\\\n", " ")
    given = {"MASTER_NODE_IP": "127.0.0.1", "NODE_RANK": "0"} | dict.fromkeys(("NUM_NODES", "NODES_NUM"), "1")
    given |= dict.fromkeys(("NUM_GPUS_PER_NODE", "GPUS_PER_NODE"), "2")
    command = re.sub(rf"\${service}_(\w+)", lambda name: given[name[1]], command)
    with socket.create_server(("127.0.0.1", 0)) as free:
        command = command.replace("29500", str(free.getsockname()[1]))
    words = [word for word in shlex.split(command) if not word.startswith("checkpoint.remote=")]
    words = [str(ROOT / word) if word == "train.py" else word for word in words[1:]]
    cut = ("train.max_steps=2", "schedule.warmup_steps=0")
    done = finish(
        "-m", "torch.distributed.run", "--start-method=fork", *words, *cut, cwd=tmp_path, forks=True
    )
    assert done.code == 0 and "2 on 1 host" in done.output, done.output


def test_what_a_block_needs_is_known() -> None:
    assert {block.needs for block in SHELL} - {None} <= NEEDS
    assert len(RUNS) > 12
