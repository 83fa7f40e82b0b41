"""Validation of the settings: valid and invalid values, and the messages."""

import copy
import dataclasses
import functools
import os
import signal
import subprocess
import sys
from itertools import groupby, zip_longest
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tests.runs import CONF, composed, settings
from trainer import api
from trainer.cli import compose
from trainer.config import load, to_yaml
from trainer.config.contradictions import check_contradictions
from trainer.config.overrides import explain
from trainer.config.saved_run import saved_settings
from trainer.errors import UserError

OPTIONS = sorted(
    f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if path.parent.name != "experiment"
)
GROUPS = [list(options) for _, options in groupby(OPTIONS, lambda option: option.partition("=")[0])]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
_slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Settings that an option requires.
NEEDS = {
    "comm=hook": ["comm.hook._target_=mine.hook"],
    "model=vision": ["model.name=resnet18"],
    "data=imagefolder": ["data.dataset.root=/data"],
    **{f"data={kind}": ["data.dataset.path=/data"] for kind in ("tokens", "hugging_face")},
    **{f"{group}=own": [f"{group}._target_=mine.It"] for group in ("model", "schedule")},
    "optim=own": ["optim._target_=mine.It", "optim.lr=0.1"],
    "data=own": ["data.dataset._target_=mine.It", "data.task._target_=mine.Task"],
    "experiment=imagefolder_resnet50": ["data.dataset.root=/data"],
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=[pytest.mark.slow] * (number > 0))
        for number, options in enumerate(zip_longest(*GROUPS))
    ],
    ids=lambda options: "-".join(filter(None, options)),
)
def test_every_option_composes(options: tuple[str | None, ...]) -> None:
    """One option of each group at a time, because composing is slow; each is combined with the defaults once."""
    taken = [option for option in options if option is not None]
    together = composed(*taken, *(word for option in taken for word in NEEDS.get(option, [])))
    for option in taken:
        group, alone = option.partition("=")[0], copy.deepcopy(_defaults())
        alone[group] = together[group]
        if option == "strategy=fsdp":  # it also chooses the checkpoint
            alone["checkpoint"] = composed(option)["checkpoint"]
        assert load(alone), option


@functools.cache
def _defaults() -> DictConfig:
    return composed()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment: str) -> None:
    option = f"experiment={experiment}"
    assert settings(option, *NEEDS.get(option, []))


def test_null_means_never_for_counts() -> None:
    names = ("train.eval_every_epochs", "train.log_every_steps", "train.skip_nonfinite")
    train = settings(*(f"{name}=null" for name in names)).train
    assert (train.eval_every_epochs, train.skip_nonfinite, train.evaluates) == (0, 0, False)
    assert train.log_interval(1000) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+foo=1", "foo is not a setting"),
        ("+train.stop={metric:eval/loss}", "train.stop has been renamed; set train.early_stopping"),
        _slow("+optim.undecayed.below_dims=2", "optim.undecayed has been renamed; set optim.no_decay"),
        _slow("+checkpoint.at_fault=true", "checkpoint.at_fault has been renamed; set checkpoint.on_failure"),
        _slow("ema.evaluate=instead", "ema.evaluate is instead, but must be one of both, ema"),
        (
            "+width=1",
            "width is not a setting; did you mean model.width? (put your own values under vars: +vars.width=",
        ),
        ("+train.batch_size=8", "train.batch_size is not a setting; did you mean train.global_batch_size?"),
        ("train.epochs=many", "train.epochs: Value 'many' of type 'str' could not be converted to Integer"),
        _slow("train.epochs=0", "train.epochs is 0, but must be at least 1"),
        (
            "train.skip_steps=[[5,3]]",
            "train.skip_steps is [[5, 3]], but must be ranges [first, last] of steps, counted from 1",
        ),
        _slow("train.skip_steps=[[0,3]]", "train.skip_steps is [[0, 3]], but must be ranges"),
        _slow("train.skip_steps=[[3]]", "train.skip_steps is [[3]], but must be ranges"),
        ("train.skip_steps=[3]", "train.skip_steps is [3], but must be ranges"),
        _slow("train.skip_steps=[[4,9],[1,4]]", "train.skip_steps is [[4, 9], [1, 4]], but must be ranges"),
        ("optim.lr=nan", "optim.lr is nan, but must be a finite number"),
        _slow("optim.lr=-1", "optim.lr is -1, but must be at least 0"),
        _slow("train.precision=fp8", "train.precision is fp8, but must be one of fp32, bf16, fp16"),
        _slow("seed=-1", "seed is -1, but must be from 0 to 2**64 - 1"),
        _slow("run_dir=", "run_dir is empty, but must be a path ('.'"),
        _slow("train=5", "train is 5, but must be a mapping; set its entries with train.NAME=VALUE"),
        _slow("train.epochs=???", "train.epochs has no value"),
        _slow("~model._target_", "model has no _target_"),
        _slow(
            "checkpoint.keep_best={metric:eval/loss} train.eval_every_epochs=0",
            "checkpoint.keep_best requires evaluations",
        ),
        _slow("train.epochs=null", "train.epochs is null, but must have a value"),
        _slow(
            "train.early_stopping=[eval/loss]",
            "train.early_stopping must be null or a mapping: 'train.early_stopping={metric: ...,",
        ),
        _slow(
            "launch=slurm launch.parameters=[a]", "launch.parameters: a list, but must be {NAME: VALUE, ...}"
        ),
        _slow(
            "data.order=ByLength",
            "data.order must be null or name a class or function: 'data.order={_target_",
        ),
        (
            "train.early_stopping={metrc:eval/loss}",
            "train.early_stopping.metrc is not a setting; train.early_stopping has the keys metric, patience,",
        ),
        _slow(
            "train.early_stopping={patience:3}",
            "train.early_stopping.metric has no value; set 'train.early_stopping={metric: ..., ...}'",
        ),
        (
            "strategy=fsdp comm=ring",
            "comm=ring needs strategy=ddp, but strategy=fsdp; use strategy=ddp, or comm=native",
        ),
        ("strategy=single comm.wire_dtype=bf16", "comm.wire_dtype=bf16 needs strategy=ddp, but strategy=sin"),
        ("distributed.device=mps strategy=ddp", "distributed.device=mps is not supported with strategy=ddp"),
        (
            "distributed.device=mps strategy=single train.exact=8",
            "device=mps is not supported with train.exact=8",
        ),
        ("strategy=dp train.compile=true", "train.compile=true is not supported with strategy=dp"),
        ("strategy=fsdp checkpoint=full", "use checkpoint=sharded, the default of fsdp"),
        (
            "train.compile_mode=reduce-overhead strategy=fsdp",
            "reduce-overhead is not supported with strategy=fsdp",
        ),
        ("comm=hook", "comm.hook._target_ has no value"),
        (
            "launch=slurm launch.parameters={array:0-3}",
            "train in the same run_dir; remove it and submit a sweep",
        ),
        (
            "launch=slurm launch.parameters={time:60}",
            "launch.parameters.time is 60; set launch.time instead",
        ),
        (
            "launch=slurm launch.time=2",
            "launch.save_before_s is 120, but must be at least 60 s shorter than the",
        ),
    ],
)
def test_refuses(override: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        settings(*override.split(" "))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_slurm_time_limit_must_allow_a_minute_of_training() -> None:
    config = settings("launch=slurm")
    times = {"5": 300, "5:30": 330, "1:00:00": 3600, "1-0": 86400, "1-2:03": 93780, "0-0:03:20": 200}
    for time, limit_s in times.items():
        launches = (
            dataclasses.replace(config.launch, time=time, save_before_s=limit_s - left_s)  # type: ignore[call-arg]
            for left_s in (60, 59)
        )
        fits, too_late = (dataclasses.replace(config, launch=launch) for launch in launches)
        check_contradictions(fits)
        with pytest.raises(UserError, match=rf"launch.time={time} \({limit_s} s\)"):
            check_contradictions(too_late)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=1", "train.epoch is not a setting; did you mean train.epochs?"),
        _slow("epochs=1", "epochs is not a setting; did you mean train.epochs?"),
        ("experimint=digits_mlp", "experimint is not a setting; did you mean experiment?"),
        _slow("qqq=1", "qqq is not a setting; `python train.py --cfg job` prints all settings"),
        _slow("experiment=digits_mpl", "; did you mean experiment=digits_mlp?"),
        _slow(
            "strategy=zero", "strategy is zero, but must be one of ddp, dp, fsdp, parameter_server, single"
        ),
        (
            "data.dataset.root=x",
            "it requires data=cifar10, data=imagefolder or data=mnist (+data.dataset.root=VALUE passes",
        ),
        ("launch=as_started", "launch is as_started, but must be one of external, local, slurm"),
        ("optim.undecayed=null", "optim.undecayed has been renamed; set optim.no_decay"),
        _slow("vars.width=1", "vars.width does not exist yet; +vars.width=VALUE adds it"),
        ("data.collate._target_=mine.f", "does not exist yet; +data.collate._target_=VALUE adds it"),
        _slow("optim.groups={match:fc}", "optim.groups must be a list: [...]"),
        _slow("data.images=[0]", "data.images must be a mapping: {NAME: VALUE, ...}"),
        _slow("data.dataset.colour=1", "(+data.dataset.colour=VALUE passes it to data.dataset._target_"),
        _slow("optim=sgd,adamw", "Ambiguous value for argument 'optim=sgd,adamw'"),
        _slow("run_dir=~/a", "run_dir=~/a cannot be parsed at '~/a'; quote the value: run_dir='\"VALUE\"'"),
        _slow(
            "model.freeze=[^a]",
            "cannot be parsed at '^a]'; quote the value: 'model.freeze=[\"VALUE\", ...]'",
        ),
        _slow("run_dir=runs/lr=1", "the value of run_dir contains a =; quote it: run_dir='\"VALUE\"'"),
        (
            "launch.setup=[module",
            "launch.setup=[module cannot be parsed; quote the whole override for the shell",
        ),
        ("launch.setup=[export A=1]", "and each string in it: 'launch.setup=[\"VALUE\", ...]'"),
        ("launch.parameters={account:", "and each string in it: 'launch.parameters={NAME: \"VALUE\", ...}'"),
        _slow(
            "train.early_stopping.metric=eval/loss",
            "cannot be set while train.early_stopping is null; set the whole mapping: 'train.early_stopping={metric",
        ),
    ],
)
def test_errors_of_hydra_suggest_what_was_meant(override: str, words: str) -> None:
    with pytest.raises(HydraException) as refused:
        composed(override)
    message = explain(refused.value)
    assert words in message
    assert "\n" not in message


def test_exceptions_inside_hydra_become_user_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "model=null"])
    with pytest.raises(UserError, match=r"^model=null cannot be composed: .+$"):
        compose()


def test_the_location_of_a_tab_in_a_settings_file_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("a:\n\tb: 1\n")
    monkeypatch.setattr("sys.argv", ["train.py", "--info", "+a-b=1", "-cd", str(tmp_path), "model=mine"])
    with pytest.raises(UserError, match=r"^model=mine cannot be composed: .*mine\.yaml\", line 2"):
        compose()


def test_the_users_own_values_and_hydras_values_are_resolved(tmp_path: Path) -> None:
    own = ["+vars.width=24", "model.hidden=['${vars.width}']", "+vars.cwd=${hydra:runtime.cwd}"]
    own += [
        "+vars.job=${hydra:job.name}",
        "+vars.model=${hydra:runtime.choices.model}",
        f"run_dir={tmp_path}",
    ]
    config = api.composed([*own, "+vars.out=${hydra:runtime.output_dir}/samples"])
    assert config.model["hidden"] == [24]
    there = {"cwd": str(Path.cwd()), "job": "train", "model": "mlp", "out": f"{tmp_path}/samples"}
    assert config.vars == {"width": 24, **there}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hydra.run.dir=x", "hydra.run.dir is x, which has no effect; remove it: run_dir=..."),
        ("resume=auto", "run_dir is null, which means a new directory for each run; set it"),
        ("hydra.job.chdir=true", "hydra.job.chdir is True, which has no effect"),
        (
            "+vars.out=${hydra:runtime.output_dir}",
            "refers to run_dir, which is null and is chosen later; set run",
        ),
        _slow("run_dir=${hydra:runtime.output_dir}", "refers to run_dir, which is null and is chosen later"),
    ],
)
def test_hydra_settings_without_effect_raise(override: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        api.composed([override])
    assert words in str(refused.value)


_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from omegaconf import OmegaConf
from ringmaster import main
OmegaConf.register_new_resolver("double", lambda value: 2 * int(value))
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_resolvers_of_a_script_are_known_in_each_trial_and_each_rank(tmp_path: Path) -> None:
    (tmp_path / "go.py").write_text(_SCRIPT.format(root=str(CONF.parent)))
    words = ["-m", "model.hidden=['${double:4}','${vars.own}']", "+vars.own=3", "train.max_steps=1"]
    words += ["launch=local", "launch.processes=1", "hydra.sweep.dir=D", "train.eval_every_epochs=0"]
    command = [sys.executable, "go.py", *words, "logger=jsonl", "checkpoint.every_epochs=null"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = tmp_path.glob("D/*/config.yaml")
    assert OmegaConf.load(trial).model.hidden == [8, 3]


def test_zero_and_null_are_values() -> None:
    config = settings("seed=0", "optim.lr=0", "train.clip_grad_norm=null")
    assert config.seed == 0
    assert config.optim["lr"] == 0
    assert config.train.clip_grad_norm is None
    assert settings("seed=null").seed is None


@pytest.mark.parametrize("ask", [["--help"], _slow(["--cfg", "job"])])
def test_a_closed_pipe_is_not_an_error(ask: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # like `| head`
    command = [sys.executable, str(CONF.parent / "train.py"), *ask]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_fsdp_saves_shards_and_older_runs_can_still_be_read(tmp_path: Path) -> None:
    assert settings("strategy=ddp").checkpoint.format == "full"
    sharded = settings("strategy=fsdp")
    assert sharded.checkpoint.format == "sharded"
    assert settings("strategy=ddp", "checkpoint=sharded").checkpoint.format == "sharded"
    older = to_yaml(sharded).replace("format: sharded", "format: full")
    (tmp_path / "config.yaml").write_text(older)
    assert "format: full" in older and saved_settings(tmp_path).strategy.name == "fsdp"
