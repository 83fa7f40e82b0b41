"""Help for known errors: an entry in docs/howto/troubleshooting.md, or settings that may be the cause.

Errors are recognized by their text, because they may come from another rank, a library or a failure report.
"""

import contextlib
import re
from collections.abc import Iterator

from trainer.config import TrainConfig

PAGE = "docs/howto/troubleshooting.md"
# The anchor of each entry -> its heading: the text of the message, with dots for the parts that vary.
ENTRIES = {
    "unknown-setting": "... is not a setting",
    "cannot-be-built": "... cannot be built: ...",
    "auto": "... is auto, but ... has no ...",
    "comm-needs-ddp": "comm=... needs strategy=ddp, but strategy=...",
    "warmup": "schedule.warmup_steps=..., but this run ends after ... steps",
    "sweep-in-ranks": "-m (multirun) under ... would start every trial on every rank",
    "one-process": "strategy=... runs in one process, not in ...",
    "gpus-of-a-host": "local rank ... has no GPU of its own: this host has ...",
    "no-gpu": "distributed.device=..., but torch sees no GPU here",
    "no-rank-0": "WORLD_SIZE=..., but the address of rank 0 is unknown",
    "ranks-missing": "waited ... for all ... ranks; missing: [...]",
    "cannot-reach": "host ... cannot reach host ...",
    "global-batch": "train.global_batch_size is ..., which is not divisible by the ... replicas",
    "few-samples": "the training data has ... samples, fewer than one global batch of ...",
    "unequal-samples": "... cannot be in a batch",
    "bad-sample": "... cannot be read: ...; fix it, or set data.on_bad_sample=skip",
    "data-worker": "its data worker ... died without a message",
    "labels": "the labels range from ... to ..., but the model has classes 0 to ...",
    "unused-parameters": "strategy=ddp: the loss of rank ... did not use ...",
    "ranks-use-other-parameters": "the loss uses ... on rank ... and not on ...",
    "nan": "... is NaN or Inf on ...",
    "replicas-differ": "replicas differ after step ...",
    "wrong-gradient": "... computed a wrong gradient for chunk ...",
    "used-run-dir": "... already contains a run (...); set resume=auto to continue it, ...",
    "alive-run": "another run is active in run_dir=...",
    "other-model": "the checkpoint is from a different model",
    "other-optimizer": "the checkpoint is from a different optimizer",
    "not-intact": "none of the ... checkpoints in ... is intact",
    "not-shared": "... set run_dir to a directory on a file system that all hosts share",
    "memory": "out of memory",
    "gloo-address": "Gloo connectFullMesh failed with ... remote=[127.0.0.1]",
    "gloo-interface": "GLOO_SOCKET_IFNAME=..., but its host ... has no interface ...",
    "duplicate-gpu": "Duplicate GPU detected",
    "same-gpu": "Multiple Ranks are using the same GPU",
    # Failures of a rank, after the messages that it may have printed.
    "died": "rank ... died of ...",
    "hangs": "rank ... hangs in ...",
    "stopped": "rank ... has been stopped (by SIGSTOP or a debugger) ...",
}
_SHARED_MEMORY = (
    "/dev/shm, through which data workers return batches, may be full (df -h /dev/shm); increase it for a "
    "container (docker run --shm-size=8g), or decrease data.num_workers or data.prefetch_factor"
)
_CAUSES = {  # message of torch -> cause
    "Expected more than 1 value per channel": (
        "a batch norm got a single sample: train.global_batch_size is {batch}, and train.micro_batch_size "
        "is {size}; increase the former, or both"
    ),
    "Expected to mark a variable ready only once": (
        "torch.utils.checkpoint with use_reentrant=True hides from DDP which parameters are used; set "
        "use_reentrant=False in the model, or use strategy.activation_checkpointing=true instead. For a "
        "model without unused parameters, strategy.static_graph=true helps too"
    ),
    "No working C++ compiler": (
        "train.compile=true requires a C++ compiler on each host; install g++, set the environment variable "
        "CXX, or set train.compile=false"
    ),
    "out of shared memory": _SHARED_MEMORY,
    "unable to write to file </torch_": _SHARED_MEMORY,
    "unable to allocate shared memory": _SHARED_MEMORY,
}


def see(message: str) -> str:
    """Return a line that refers to the troubleshooting entry for `message`; "" if there is none."""
    for anchor, heading in ENTRIES.items():
        if re.search(".*".join(map(re.escape, heading.split("..."))), message, re.DOTALL):
            return f"\n  see {PAGE}#{anchor}"
    return ""


@contextlib.contextmanager
def causes_named(train: TrainConfig) -> Iterator[None]:
    """Add a note to known errors of torch that are raised in the block, with the settings to change."""
    try:
        yield
    except Exception as error:
        import torch  # already loaded here; the launcher imports this module without torch

        size = "null" if train.micro_batch_size is None else train.micro_batch_size
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            error.add_note(
                f"train.micro_batch_size={size} was too large; a smaller micro-batch size gives the same "
                "global batch with more accumulation steps"
            )
        for text, cause in _CAUSES.items():
            if text in str(error):
                error.add_note(cause.format(size=size, batch=train.global_batch_size))
        raise
