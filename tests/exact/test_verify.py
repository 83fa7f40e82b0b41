"""train.verify_every finds the rank whose device produces wrong results; the run resumes at a verified step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.exact.flips import Flip, Found, found_each
from tests.exact.matrix import MODELS, OPTIMIZERS, figures, refused_each
from tests.programs import finish, torchrun
from tests.ranks import run_ranks
from tests.runs import settings
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import SetAside
from trainer.checkpoint.manifest import write_text
from trainer.checkpoint.store import Store
from trainer.exact.verify import burn_in
from trainer.guards.verification import offsets, vote

SHORT = (
    *("train.max_steps=4", "train.epochs=1", "train.eval_every_epochs=0", "checkpoint.every_epochs=null"),
    *("schedule=constant", "train.verify_every=1", "distributed.timeout_s=60", "train.global_batch_size=24"),
)


def found(folder: Path, world: int, *cases: tuple[Flip, str], **options: Any) -> list[Found]:
    """Return the results of runs on `world` ranks, each with a flip and a strategy."""
    each = [
        (flip, (*SHORT, f"train.exact={world}", f"strategy={strategy}", f"run_dir={folder}/{number}"))
        for number, (flip, strategy) in enumerate(cases)
    ]
    results = run_ranks(found_each, world, *each, init=False, **options)
    return [results[flip.rank][number] for number, (flip, _) in enumerate(cases)]


# ---- a wrong device is found and named


def test_a_wrong_rank_is_named(tmp_path: Path) -> None:
    """Three ranks decide by majority, although the error repeats in each pass of the wrong rank."""
    always = [
        (Flip("gradient", "mantissa", rank=2), "ddp"),
        (Flip("sum", "sign", rank=0), "fsdp"),
        (Flip("weight", "sign", rank=1), "fsdp"),
    ]
    for (flip, _), each in zip(always, found(tmp_path, 3, *always), strict=True):
        assert each.ranks == [flip.rank], each
    wrong = json.loads((tmp_path / "0" / "failure.json").read_text())
    assert wrong["status"] == 76 and wrong["rank"] == 2
    suspect = wrong["suspect"]
    assert suspect.items() >= {"rank": 2, "step": 1, "parameter": "1.weight", "verified_step": 0}.items()
    assert suspect["exclude"]["slurm"] == f"--exclude={suspect['host']}"


def test_a_loss_that_changes_its_batch_accuses_no_other_rank(tmp_path: Path) -> None:
    case = (
        Flip("gradient", "mantissa", rank=2),
        (
            *SHORT,
            *("train.exact=3", "strategy=ddp", "data.task._target_=tests.exact.flips.Noisy"),
            f"run_dir={tmp_path}",
        ),
    )
    assert run_ranks(found_each, 3, case, init=False)[2][0].ranks == [2]


def test_the_burn_in_prepares_the_task() -> None:
    words = (
        "train.exact=2",
        "train.verify_every=1",
        "strategy=ddp",
        "data.task._target_=tests.exact.flips.Noisy",
    )
    assert run_ranks(burn_in, 2, settings(*words), 1e-6, init=False) == [1, 1]


@pytest.mark.slow
def test_the_burn_in_starts_its_own_processes() -> None:
    alone = finish("-m", "trainer.exact.verify", "--minutes=0.001", "distributed.device=cpu")
    assert alone.code == 2 and "--nproc_per_node=2 -m trainer.exact.verify" in alone.output
    command = ("-m", "trainer.exact.verify", "--minutes=0.001", "distributed.device=cpu", *LOCAL)
    assert "have the same gradients on 2 ranks" in finish(*command).output


def test_two_ranks_name_an_error_that_does_not_repeat(tmp_path: Path) -> None:
    """One of four computations differs; an error that repeats leaves two against two."""
    once, always = Flip("activation", "exponent", rank=1, at=5), Flip("activation", "exponent", rank=1)
    named, unknown = found(tmp_path, 2, (once, "ddp"), (always, "ddp"))
    assert named.ranks == [1] and once.at == 5
    assert unknown.ranks == [0, 1] and unknown.suspect["rank"] is None
    assert "it is unknown which rank is wrong" in unknown.message


def test_a_wrong_sum_is_found_in_a_step_without_recomputation(tmp_path: Path) -> None:
    cases = [(Flip("received", "mantissa", rank=1), strategy) for strategy in ("ddp", "fsdp")]
    each = [
        (
            flip,
            (
                *SHORT,
                "train.exact=2",
                f"strategy={strategy}",
                f"run_dir={tmp_path}/{strategy}",
                "train.verify_every=100",
            ),
        )
        for flip, strategy in cases
    ]
    ddp, fsdp = run_ranks(found_each, 2, *each, init=False)[1]
    assert "received a wrong sum" in ddp.message and "received a wrong sum" in fsdp.message
    assert ddp.ranks == [1]
    assert fsdp.ranks == [] and fsdp.suspect["exclude"] == {}, "a rank that sent its part may be the cause"


def test_the_majority_decides() -> None:
    right, wrong = (1, 2, 3), (1, 5, 4)
    assert vote([(0, right), (1, wrong), (0, right), (1, right)]) == ([1], 3, 1)
    assert vote([(0, right), (1, wrong), (0, right), (1, wrong)])[0] == []
    assert vote([(2, wrong), (0, right), (0, right), (1, right), (2, wrong)]) == ([2], 3, 1)


def test_the_partner_is_on_another_host() -> None:
    assert offsets([0, 0, 1, 1]) == [2]
    assert offsets([0, 0, 0]) == [1, 2]
    assert offsets([0, 1, 2]) == [1, 2]


# ---- a verified run is the same run


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "norm", "resnet", "gpt"])
def test_verification_does_not_change_the_result(tmp_path: Path, model: str) -> None:
    """With dropout, an average of the weights, batch norm; the chunks of two ranks are uneven under ddp."""
    words = (*MODELS[model], *OPTIMIZERS["adamw"], "train.max_steps=6", "ema.decay=0.9")
    plain = figures(tmp_path / "1", 1, (*words, "strategy=single"))
    verified = (*words, "train.verify_every=1")
    two = figures(tmp_path / "2", 2, (*verified, "strategy=fsdp"), (*verified, "strategy=ddp", "comm=ring"))
    three = figures(tmp_path / "3", 3, (*verified, "strategy=ddp", "train.verify_every=2"))
    assert {*plain, *two, *three} == {plain[0]}


def test_verification_with_unsuitable_settings_is_refused() -> None:
    (single, alone) = run_ranks(
        refused_each,
        1,
        ("train.verify_every=5", "strategy=single"),
        ("train.verify_every=5", "strategy=ddp"),
        init=False,
    )[0]
    assert "train.verify_every=5 needs train.exact and strategy=ddp or fsdp" in single
    assert "train.verify_every=5 needs at least 2 ranks" in alone


# ---- checkpoints


WORDS = (
    *("train.exact=4", "train.max_steps=18", "checkpoint.every_steps=1", "checkpoint.keep_last=2"),
    *("train.eval_every_epochs=0", "schedule=constant", "strategy=ddp", "train.verify_every=5"),
    # 2 passes of the dry run, 2 in each of 14 steps, 2 recomputations; then one, and the second chunk of step 15
    *("model._target_=tests.exact.flips.FlippingMLP", "+model.at=35"),
)
LOCAL = ("launch=local", "launch.processes=2")


def clean_hash(tmp_path: Path) -> str:
    """Return the hash of a run on one rank without flips."""
    words = (*WORDS, "train.verify_every=null", "strategy=single", f"+model.marker={tmp_path}/none")
    if not (tmp_path / "clean").exists():
        assert finish("train.py", *words, f"run_dir={tmp_path}/clean").code == 0
    return hash_of(tmp_path / "clean")


def hash_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


@pytest.mark.slow
def test_a_restart_continues_from_the_verified_step(tmp_path: Path) -> None:
    """The run resumes from step 10 instead of step 14, also from another disk."""
    flips = (
        *WORDS,
        *LOCAL,
        f"+model.marker={tmp_path}/flipped",
        f"checkpoint.remote=file://{tmp_path}/store",
    )
    failed = finish("train.py", *flips, f"run_dir={tmp_path}/run", forks=True)
    assert failed.code == 76 and (tmp_path / "flipped").exists(), failed.output
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    (tmp_path / "store").rename(tmp_path / "store of another disk")
    resumed = finish("train.py", *flips, f"run_dir={copy}", "resume=auto", forks=True)
    (tmp_path / "store").rename(tmp_path / "second store")
    (tmp_path / "store of another disk").rename(tmp_path / "store")
    elsewhere = finish("train.py", *flips, f"run_dir={tmp_path}/new", "resume=auto", forks=True)
    for each, run_dir in ((resumed, copy), (elsewhere, tmp_path / "new")):
        assert each.code == 0, each.output
        assert "continuing from step_00000010; later checkpoints must be skipped" in each.output
        assert hash_of(run_dir) == clean_hash(tmp_path)
    kept = {path.name for path in (copy / "checkpoints").iterdir()}
    assert kept >= {"step_00000013", "step_00000014"}, "a checkpoint that was set aside is kept"


@pytest.mark.slow
def test_launchers_restart_the_run(tmp_path: Path) -> None:
    local = ("train.py", *WORDS, *LOCAL, "launch.max_restarts=1")
    started = {"local": local, "torchrun": (*torchrun(2, "--max-restarts=1"), *WORDS, "resume=auto")}
    for name, command in started.items():
        run_dir = tmp_path / name
        ended = finish(*command, f"+model.marker={tmp_path}/{name}-flipped", f"run_dir={run_dir}", forks=True)
        assert ended.code == 0 and (tmp_path / f"{name}-flipped").exists(), ended.output
        assert "continuing from step_00000010" in ended.output
        assert hash_of(run_dir) == clean_hash(tmp_path)


def test_the_newest_verified_checkpoint_is_kept(tmp_path: Path) -> None:
    """Checkpoints after a verified step that later resumes skip are neither listed nor deleted."""
    store = Store(tmp_path / "checkpoints", "run")
    for step, verified in ((10, 10), (12, 10), (14, 10), (16, 10)):
        directory = store.new_directory(step)
        store.commit(step, "full", {"a": write_text(directory / "a", "a")}, "branch", verified)
    pruned = [path.name for path in store.to_prune(settings().checkpoint, Evaluations(tmp_path))]
    assert pruned == ["step_00000012"]
    SetAside({"branch": 10}, "a reason").write(tmp_path)
    assert [path.name for path in store.own()] == ["step_00000010"]
    assert store.to_prune(settings().checkpoint, Evaluations(tmp_path)) == []
    SetAside({"other": 5}, "a reason").write(tmp_path)
    assert len(store.own()) == 4
