"""The error for a loss or a gradient that is NaN or Inf, which names its rank or its parameter."""

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.context import Run
from trainer.distributed.agreement import gather_objects
from trainer.errors import NonFiniteError, first_few


def non_finite_error(run: Run, step: int, losses: Sequence[Tensor]) -> NonFiniteError:
    """Return the error, which names a rank with such a loss, or else a parameter (a collective)."""
    ranks, state, limit = run.ranks, run.state, run.strategy.order.limit
    bad_loss = not all(math.isfinite(loss) for loss in losses)
    named = [(name, own.grad) for name, own in state.trainable.own.items()]
    bad = [name for name, gradient in named if gradient is not None and not _is_finite(gradient)]
    begin = state.progress.epoch, state.progress.samples_in_epoch
    own = bad_loss, bad, run.data.train_loader.not_finite(*begin) if bad_loss else None
    everyones = gather_objects(own)
    for rank, (is_bad, _, sample) in enumerate(everyones):
        if is_bad:
            look = "Lower optim.lr, set train.clip_grad_norm, or check the data of that rank"
            if sample is not None:
                look = f"Its data has NaN or Inf itself, in {sample}: fix it, or leave it out"
            where = f"{ranks.describe(rank)}; no rank applied that step"
            return NonFiniteError(f"the loss of step {step} is NaN or Inf on {where}. {look}", (rank,))
    found = [name for name, _ in named if any(name in theirs for _, theirs, _ in everyones)]
    what = (
        f"the gradient of {first_few(found, 1)}"
        if found
        else "the norm of the gradients, each of them finite,"
    )
    beyond = f", or beyond +-{limit:g}, as far as train.exact counts," if limit < math.inf else ""
    alone = ranks.world_size == 1
    return NonFiniteError(
        f"{what} is NaN or Inf{beyond} in step {step} on "
        f"{ranks.describe(0) if alone else 'some rank'}; no rank applied that step. Look for a root "
        "or a logarithm of 0, or a division by 0, in the model and the loss; or lower optim.lr",
        (0,) if alone and found else (),
    )


def _is_finite(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
