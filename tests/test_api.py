"""The Python API in a program, after failures, and in a notebook's kernel."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer
from tests.programs import fork_new_processes
from tests.ranks import run_ranks
from trainer.config.saved_run import saved_settings
from trainer.data.digits import Digits
from trainer.data.images import ImagesInMemory
from trainer.errors import NonFiniteError, UserError
from trainer.predict import predict as write_predictions
from trainer.report import run_hash

ROOT = Path(__file__).parents[1]
TINY = [
    "logger=jsonl",
    "train.max_steps=4",
    "train.log_every_steps=2",
    "distributed.device=cpu",
    "model.hidden=[8]",
]


class Broken:
    def __init__(self, **_: Any) -> None:
        raise ValueError("not today")


WRONG = {
    "train.epoch is not a setting; did you mean train.epochs?": "train.epoch=1",
    "models.mlp.Mpl cannot be built": "model._target_=models.mlp.Mpl",
    "Broken cannot be built": "data.dataset._target_=tests.test_api.Broken",
    "NaN or Inf": "optim.lr=1e30",
}


def failures_in_between(run_dir: str) -> list[str]:
    """Return the hashes of a run before and after runs that fail at each stage, and Python's output."""
    os.environ.clear()
    results = [trainer.train([*TINY, f"run_dir={run_dir}/0"])["param_sha256"]]
    for number, wrong in enumerate(WRONG.values()):
        with pytest.raises((UserError, NonFiniteError)) as error:
            trainer.train([*TINY, wrong, "train.max_steps=40", f"run_dir={run_dir}/wrong-{number}"])
        results.append("".join(traceback.format_exception(error.value)))
    with pytest.raises(UserError, match=r"already contains a run \(.*; set resume=auto to continue it"):
        trainer.train([*TINY, f"run_dir={run_dir}/0"], processes=1)
    return [*results, trainer.train([*TINY, f"run_dir={run_dir}/1"], processes=1)["param_sha256"]]


@pytest.mark.slow
def test_a_mistake_raises_a_one_line_error_and_the_next_call_works(tmp_path: Path) -> None:
    before, *printed, after = run_ranks(failures_in_between, 1, str(tmp_path), init=False)[0]
    assert before == after
    for text, said in zip(printed, WRONG, strict=True):
        assert said in text.splitlines()[-1]
        if "Broken" in said:
            assert 'raise ValueError("not today")' in text, "the line of a user's own class"
        else:
            assert text.count("Traceback") == 1 and len(text.splitlines()) < 10, text


def loaded(run_dir: str) -> list[str]:
    """Return the hash of a run's model, and of the models loaded from it in every way."""
    os.environ.clear()
    options = ["checkpoint.every_steps=11", "checkpoint.keep_last=99", f"run_dir={run_dir}"]
    options += ["checkpoint.keep_best={metric: eval/loss, mode: max}", "model=mlp", "train.max_steps=44"]
    made = trainer.train([*TINY, *options])["param_sha256"]
    torch.manual_seed(5)
    first = Path(run_dir, "checkpoints", "step_00000011")
    models = [trainer.load_model(run_dir, name) for name in ("newest", "best", first)]
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert drawn == torch.rand(1)  # loading does not draw from the program's generator
    assert not any(model.training for model in models)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [made, *map(run_hash.parameters_sha256, models)]


def test_a_model_is_loaded_from_its_run(tmp_path: Path) -> None:
    made, newest, best, first = run_ranks(loaded, 1, str(tmp_path), init=False)[0]
    assert newest == made
    assert len({newest, best, first}) == 3  # the worst evaluation came after the first epoch of two


class InAFile(ImagesInMemory):
    """Digits as bytes, from a file that may be missing."""

    def __init__(self, split: str, path: str) -> None:
        images, labels = torch.load(path)
        super().__init__(images, labels, num_classes=10, mean=(0.3,), std=(0.2,))


def opened(run_dir: str) -> list[Any]:
    """Return the output of `trainer.predict`, and the predictions of the opened run without its data."""
    os.environ.clear()
    digits, file = Digits("eval"), Path(run_dir, "digits.pt")
    images = (digits.images[:70] * 255).byte()
    file.parent.mkdir()
    torch.save((images, digits.labels[:70]), file)
    data = ["data.dataset._target_=tests.test_api.InAFile", f"+data.dataset.path={file}"]
    data += ["data.eval_transforms=[{_target_: torchvision.transforms.v2.RandomHorizontalFlip, p: 1}]"]
    trainer.train([*TINY, *data, f"run_dir={run_dir}/run"])
    write_predictions(saved_settings(Path(run_dir, "run")), Path(run_dir, "written.pt"))
    written = torch.load(f"{run_dir}/written.pt")
    file.unlink()
    run = trainer.open(f"{run_dir}/run")
    found = run.predict(list(zip(images, digits.labels, strict=False)), batch_size=32)
    alone = run.predict(images)
    assert "label" in found and "label" not in alone and not run.model.training
    with pytest.raises(UserError, match=r"has no `unlabelled"):
        run.predict(["a.png"])
    with pytest.raises(UserError, match=r"expects a list of samples, but got a str"):
        run.predict("a.png")
    return [written["probabilities"], found["probabilities"], alone["probabilities"]]


@pytest.mark.slow
def test_a_run_is_opened_and_predicts_without_its_data(tmp_path: Path) -> None:
    written, found, alone = run_ranks(opened, 1, str(tmp_path / "it"), init=False)[0]
    assert len(written) == 70
    torch.testing.assert_close(found, written)
    assert torch.equal(alone.argmax(1), found.argmax(1))


def test_a_class_of_main_is_refused() -> None:
    with pytest.raises(UserError, match=r"model._target_=__main__.Net .*set model._target_=mine.Net"):
        trainer.train(["model._target_=__main__.Net"], processes=2)
    with pytest.raises(UserError, match="must be a list"):
        trainer.train("strategy=ddp")


CELLS = [
    "try:\n    trainer.train(['strategy=dpp'], processes=2)\nexcept ValueError as error:\n    print(error)",
    "class Own(torch.nn.Linear):\n    def __init__(self): super().__init__(64, 10)\n"
    "    def forward(self, x): return super().forward(x.flatten(1))\n"
    "own = ['~model', '+model._target_=__main__.Own', 'train.max_steps=2', 'run_dir=own']\n"
    "trainer.train(own)\n"
    "try:\n    trainer.train(own, processes=2)\nexcept ValueError as error:\n    print(error)",
]


def executed(notebook: Any, folder: Path) -> list[str]:
    """Return what each cell of `notebook` prints and returns, executed in `folder` by a kernel."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    kernel: dict[str, Any] = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    specs = folder / "data" / "kernels" / "here"
    specs.mkdir(parents=True)
    (specs / "kernel.json").write_text(json.dumps(kernel | {"display_name": "here", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "data"))
        nbclient.NotebookClient(
            notebook, timeout=250, kernel_name="here", resources={"metadata": {"path": str(folder)}}
        ).execute()
    return [
        "".join(out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_the_notebook_of_the_examples(tmp_path: Path) -> None:
    """Also checks what a kernel prints on mistakes."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples/first_run.ipynb", as_version=4)
    path = nbformat.v4.new_code_cell(f"import sys; sys.path.insert(0, {str(ROOT)!r})")
    notebook.cells = [path, *notebook.cells, *map(nbformat.v4.new_code_cell, CELLS)]
    _, digits, spirals, losses, model, mistake, own = executed(notebook, tmp_path)
    assert float(digits.split()[-1]) > 0.85 and float(spirals.split()[-1]) > 0.6
    assert "2 on 1 host (cpu" in digits, "rank 0's log reaches the cell"
    assert losses.startswith("[(") and model.startswith("tensor([[")
    assert "strategy is dpp, but must be one of" in mistake
    assert "__main__.Own" in own and "mine.Own" in own


def ends_of_processes(run_dir: str) -> list[str]:
    """Return what a mistake that only ranks can find, and a NaN, raise here."""
    os.environ.clear()
    os.chdir(run_dir)
    fork_new_processes()
    results = []
    for kind, word in ((UserError, "train.global_batch_size=2001"), (NonFiniteError, "optim.lr=1e30")):
        with pytest.raises(kind) as error:
            trainer.train([*TINY, word, "train.max_steps=40"], processes=2)
        results.append(str(error.value))
    return results


@pytest.mark.slow
def test_failures_of_processes_are_raised(tmp_path: Path) -> None:
    mistake, diverged = run_ranks(ends_of_processes, 1, str(tmp_path), init=False, fresh=True)[0]
    assert "2001" in mistake
    assert "NaN or Inf" in diverged
    assert len(list(tmp_path.glob("runs/*/*/failure.json"))) == 2, "processes need no run directory"


MINE = "dataset: {_target_: trainer.data.digits.Digits}\ntask: {_target_: trainer.tasks.Classification}\n"


def from_own_folders(folders: list[str], run_dir: str) -> list[Any]:
    """Return results with a data file of the user's, here and in launched processes, and an error."""
    os.environ.clear()
    fork_new_processes()
    words = [*TINY, "data=mine"]
    found = [
        trainer.train([*words, f"run_dir={run_dir}/{n}"], processes=n, config_dirs=folders)["world_size"]
        for n in (1, 2)
    ]
    with pytest.raises(UserError) as refused:
        trainer.train(words, config_dirs=[f"{run_dir}/none"])
    return [*found, str(refused.value)]


@pytest.mark.slow
def test_config_dirs(tmp_path: Path) -> None:
    folders = [tmp_path / "it's a, place", tmp_path / "empty"]
    (folders[0] / "data").mkdir(parents=True)
    folders[1].mkdir()
    (folders[0] / "data" / "mine.yaml").write_text(MINE)
    arguments = ([str(folder) for folder in folders[::-1]], str(tmp_path))
    one, two, refused = run_ranks(from_own_folders, 1, *arguments, init=False)[0]
    assert (one, two) == (1, 2)
    assert (
        refused
        == f"config_dirs contains {tmp_path}/none, which is not a folder; pass folders structured like conf/"
    )
