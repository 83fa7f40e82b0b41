"""A checkpoint that one process writes, of the whole state in its memory, while the others may be gone."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer.checkpoint.hashing import write_text
from trainer.checkpoint.layout import index_to_json, plan
from trainer.checkpoint.state_file import STATE, check_size
from trainer.checkpoint.store import Store
from trainer.checkpoint.writing import write_tensors
from trainer.distributed.agreement import Alone


def write_alone(
    store: Store,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: dict[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """Write the checkpoint of `step`, without a collective.

    A failure leaves what was there before.

    Args:
        tensors: whole ones, by their names in a checkpoint.
        facts: as in STATE, without the index of tensors.

    Raises:
        OSError: the disk is full, or fails.
    """
    agreement = Alone()
    who = plan(tensors, (), False, agreement)
    directory = store.begin(step)
    try:
        files = write_tensors(directory, tensors, who, 0, agreement.group)
        facts = facts | {"tensors": index_to_json(who.index(tensors))}
        files[STATE] = write_text(directory / STATE, json.dumps(facts))
        check_size(files[STATE].bytes, sum(file.bytes for file in files.values()))
        store.commit(step, "full", files, metrics)
    except BaseException:
        store.abandon(directory)
        raise
