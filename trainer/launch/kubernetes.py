"""launch=kubernetes: the run as a JobSet, whose pods each start their processes by launch=local."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

import yaml

from trainer.config import Config, KubernetesLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import UserError

# When a pod has failed, a JobSet starts all of them again. The message patterns need JobSet 0.10.1 or newer.
_JOB_SET = Template("""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
spec:
  failurePolicy:
    maxRestarts: $max_restarts
    restartStrategy: BlockingRecreate         # no new pod meets one of the attempt before
    rules:
    - name: final                             # a mistake, or NaN: a restart would end in the same way
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ['exit code [23] ']
    - name: stopped                           # by a signal after a save, or with its node
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: $nodes
        parallelism: $nodes
        backoffLimit: 0                       # no pod is replaced alone
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: ringmaster, operator: In, values: [2, 3, 75]}
          - action: FailJob
            onPodConditions: [{type: DisruptionTarget, status: 'True'}]
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: $save_within_s
            containers:
            - name: ringmaster
              image: $image
              command: [ringmaster]
              args: $args
              env:
              - {name: PET_NNODES, value: '$nodes'}
              - {name: PET_NPROC_PER_NODE, value: '$processes'}
              - {name: PET_MASTER_ADDR, value: $name-node-0-0.$name}
              - {name: PET_MASTER_PORT, value: '29400'}
              - name: PET_NODE_RANK
                valueFrom:
                  fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
              volumeMounts: [{name: shm, mountPath: /dev/shm}]
            volumes:                          # in place of 64 MiB, which data workers and NCCL exceed
            - {name: shm, emptyDir: {medium: Memory}}
""")
_SUBMIT_S = 120


def launch(config: Config, argv: Sequence[str]) -> int:
    """Print the JobSet, or submit it through kubectl without waiting for its end; return 0.

    Raises:
        UserError: kubectl is missing, or refuses the JobSet; `resume` is a path; or shards of a checkpoint
            would lie on several disks.
    """
    settings = config.launch
    assert isinstance(settings, KubernetesLaunchConfig)
    text = yaml.safe_dump(job_set(config, argv), sort_keys=False, width=1000)
    has_volumes = "volumes" in (settings.pod or {})
    if config.checkpoint.format == "sharded" and settings.nodes > 1 and not has_volumes:
        raise UserError(
            "checkpoint=sharded needs a disk that all pods share, for their parts of a checkpoint: set "
            "launch.pod.volumes and launch.container.volumeMounts, or checkpoint=full"
        )
    if config.checkpoint.remote is None and not has_volumes:
        print(
            "note: after a restart the run begins at step 0, since the pods keep no files: set "
            "checkpoint.remote, or launch.pod.volumes and launch.container.volumeMounts",
            file=sys.stderr,
        )
    if settings.dry_run:
        print(text, end="")
        return 0
    if shutil.which("kubectl") is None:
        raise UserError(
            "launch=kubernetes needs kubectl, which is not here; launch.dry_run=true prints what "
            "`kubectl create -f -` takes where it is"
        )
    submit = ["kubectl", "create", "-f", "-"]  # `apply` says "unchanged" of a job that has ended
    try:
        done = subprocess.run(
            submit, input=text, text=True, capture_output=True, timeout=_SUBMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"kubectl has not submitted the job in {_SUBMIT_S} s: is the cluster up?") from None
    if done.returncode:
        raise UserError(f"kubectl refuses the job: {' '.join(done.stderr.split())}")
    pods = f"jobset.sigs.k8s.io/jobset-name={settings.job_name}"
    print(f"{done.stdout.strip()}  ->  kubectl logs -f -l {pods},batch.kubernetes.io/job-completion-index=0")
    return 0


def job_set(config: Config, argv: Sequence[str]) -> dict[str, Any]:
    """The JobSet of a run with this command line, in plain values.

    Raises:
        UserError: `resume` is a path, from which each restart would begin.
    """
    settings = config.launch
    assert isinstance(settings, KubernetesLaunchConfig)
    if config.resume not in (None, "auto"):
        raise UserError(
            f"resume={config.resume} is where each restart would begin again; under launch=kubernetes it "
            "must be auto; model.init_from begins with weights from elsewhere"
        )
    replaced = ("launch=", "launch.", "run_dir=", "resume=")
    args = [word for word in argv if not word.lstrip("+").startswith(replaced)]
    run_dir = config.run_dir or f"runs/{settings.job_name}"
    args += ["launch=local", set_to("run_dir", run_dir), "resume=auto"]
    values = {"nodes": settings.nodes, "processes": settings.processes, "name": settings.job_name}
    values |= {"max_restarts": settings.max_restarts, "save_within_s": settings.save_within_s}
    values |= {"image": json.dumps(settings.image), "args": json.dumps(args)}
    printed: dict[str, Any] = yaml.safe_load(_JOB_SET.substitute(values))
    template = printed["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    container = template["spec"]["containers"][0]
    if settings.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": settings.gpus}}
    template["spec"]["containers"] = [_with(container, settings.container or {})]
    template["spec"] = _with(template["spec"], settings.pod or {})
    return printed


def _with(fields: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` and `further`, whose values win; mappings are merged, and objects in lists are appended."""
    merged = dict(fields)
    for name, value in further.items():
        known = merged.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            value = _with(known, value)
        elif isinstance(known, list) and isinstance(known[0], dict):
            if not isinstance(value, list):
                raise UserError(f"launch.container or launch.pod: {name} is {value}, but must be a list")
            value = [*known, *value]
        merged[name] = value
    return merged
