"""The error for a loss or gradient that is NaN or Inf."""

import math
from collections.abc import Sequence

from torch import Tensor

from trainer.context import Run
from trainer.distributed.agreement import gather_objects
from trainer.errors import NonFiniteError, first_few


def non_finite_error(run: Run, step: int, losses: Sequence[Tensor]) -> NonFiniteError:
    """Return an error that names a rank with a non-finite loss, or else a parameter (a collective)."""
    ranks, state, limit = run.ranks, run.state, run.strategy.order.limit
    bad_loss = not all(math.isfinite(loss) for loss in losses)
    gradients = [(name, own.grad) for name, own in state.trainable.own.items()]
    bad = [name for name, gradient in gradients if gradient is not None and not _is_finite(gradient)]
    position = state.progress.epoch, state.progress.samples_in_epoch
    own = bad_loss, bad, run.data.train_loader.not_finite(*position) if bad_loss else None
    all_ranks = gather_objects(own)
    for rank, (is_bad, _, sample) in enumerate(all_ranks):
        if is_bad:
            advice = "Lower optim.lr, set train.clip_grad_norm, or check the data of that rank"
            if sample is not None:
                advice = f"Its data contains NaN or Inf, in {sample}: fix or remove that sample"
            where = f"{ranks.describe(rank)}; no rank applied the update"
            return NonFiniteError(f"the loss of step {step} is NaN or Inf on {where}. {advice}", (rank,))
    names = [name for name, _ in gradients if any(name in bad_names for _, bad_names, _ in all_ranks)]
    what = (
        f"the gradient of {first_few(names, 1)}"
        if names
        else "the norm of the gradients, each of which is finite,"
    )
    overflow = f", or beyond +-{limit:g}, the largest sum with train.exact," if limit < math.inf else ""
    single = ranks.world_size == 1
    return NonFiniteError(
        f"{what} is NaN or Inf{overflow} in step {step} on "
        f"{ranks.describe(0) if single else 'some rank'}; no rank applied the update. Look in the model and "
        "the loss for a square root or logarithm of 0, or a division by 0; or lower optim.lr",
        (0,) if single and names else (),
    )


def _is_finite(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
