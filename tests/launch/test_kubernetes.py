"""The JobSet and the TrainJob of docs/howto/kubernetes.md: valid, consistent, and their script returns the run's status."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from tests.ranks import ROOT
from tests.runs import settings
from trainer.errors import NonFiniteError, StoppedBySignal, UserError

PAGE = (ROOT / "docs/howto/kubernetes.md").read_text()
JOB_SET, TRAIN_JOB = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
(REPLICATED,) = JOB_SET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
TOLD = {entry["name"]: entry.get("value", "1") for entry in CONTAINER["env"]}


def _valid(job_set: dict[str, Any]) -> None:
    """Raises what the two schemas find: that of JobSet, and Kubernetes's own of the Job in it."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    model = models.JobsetV1alpha2JobSet.from_dict(deepcopy(job_set))
    assert model.to_dict() == job_set, "a field that the schema does not know is left out"
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
    for version in ("1.31", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.slow
def test_both_are_valid() -> None:
    _valid(JOB_SET)
    wrong = deepcopy(JOB_SET)
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "2"
    with pytest.raises(Exception, match=r"completion|valid"):
        _valid(wrong)
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    assert models.TrainerV1alpha1TrainJob.from_dict(deepcopy(TRAIN_JOB)).to_dict() == TRAIN_JOB


def test_names_numbers_and_statuses_agree() -> None:
    assert TOLD["PET_MASTER_ADDR"] == "{0}-{1}-0-0.{0}".format(
        JOB_SET["metadata"]["name"], REPLICATED["name"]
    )
    assert JOB["completions"] == JOB["parallelism"] == int(TOLD["PET_NNODES"])
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {each["name"] for each in POD["volumes"]}
    by_status = JOB["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert by_status["containerName"] == CONTAINER["name"]
    final = {UserError.exit_code, NonFiniteError.exit_code}
    assert set(by_status["values"]) == final | {StoppedBySignal.exit_code}
    (pattern,) = JOB_SET["spec"]["failurePolicy"]["rules"][0]["onJobFailureMessagePatterns"]
    for status in by_status["values"]:  # as Kubernetes writes it
        message = f"Container trainer for pod a/b-node-0-1 failed with exit code {status} matching FailJob rule at index 0"
        assert bool(re.search(pattern, message)) == (status in final)


def test_torchrun_and_the_run_understand_the_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    (line,) = (line for line in CONTAINER["args"][0].splitlines() if line.startswith("torchrun"))
    of_train_job = TRAIN_JOB["spec"]["trainer"]
    for words in (shlex.split(line.rstrip(" &")), [*of_train_job["command"], *of_train_job["args"]]):
        assert words[0] == "torchrun"
        options = parse_args(words[1:])
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "4", 1)
        assert (options.master_addr, options.master_port) == ("mine-node-0-0.mine", 29400)
        assert options.shutdown_timeout < POD["terminationGracePeriodSeconds"]
        assert options.training_script == "train.py"
        config = settings(*(word.replace("$RUN", TOLD["RUN"]) for word in options.training_script_args))
        assert (config.strategy.name, config.resume) == ("fsdp", "auto")


TORCHRUN = """#!/bin/sh
[ ! -e $RUN/failure.json ] || exit 9    # one of the attempt before
trap 'printf "{\\"status\\": 75}" > $RUN/failure.json; exit 1' TERM
[ -z "$STATUS" ] || printf "{\\"status\\": $STATUS}" > $RUN/failure.json
touch $RUN/started
[ -z "$WAITS" ] || while :; do sleep 0.05; done
exit $CODE
"""


@pytest.mark.parametrize(
    ("code", "status", "signalled", "expected"),
    [(1, "", False, 1), (1, "3", False, 3), (0, "", True, 75)],
)
def test_the_script_returns_the_status_of_the_run(
    code: int, status: str, signalled: bool, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "failure.json").write_text('{"status": 2}')
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path)}
    environment |= {"CODE": str(code), "STATUS": status, "WAITS": "yes" if signalled else ""}
    pod = subprocess.Popen([*CONTAINER["command"], *CONTAINER["args"]], env=environment)
    try:
        deadline = time.monotonic() + 60
        while signalled and not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if signalled:
            pod.send_signal(signal.SIGTERM)
        assert pod.wait(60) == expected
    finally:
        pod.kill()
        pod.wait()
