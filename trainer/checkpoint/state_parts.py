"""What a checkpoint of this run holds: the live tensors by name, and all else in plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainer.checkpoint.expected import Expected
from trainer.checkpoint.state_file import DATA_STATES, MODEL_CONFIG
from trainer.checkpoint.tree import take_apart
from trainer.distributed.agreement import Agreement
from trainer.distributed.process_group import Dist
from trainer.errors import NonFiniteError, first_few
from trainer.optim.train_state import TrainState


class StateParts:
    """Takes the state of a run apart for each of its checkpoints.

    Attributes:
        expected: what the state must contain.
        facts: what each checkpoint says of the run.
    """

    def __init__(self, expected: Expected, facts: Mapping[str, Any]) -> None:
        """``facts`` are those that do not follow from ``expected``."""
        self.expected = expected
        self.facts: dict[str, Any] = {**facts, MODEL_CONFIG: expected.model_config}

    def of(
        self,
        state: TrainState,
        data_states: Sequence[Mapping[str, Any]],
        kept: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of ``state``, by their names in a checkpoint, and its facts.

        Args:
            data_states: where the data of each rank stands.
            kept: by names in the model's state, in place of its own values there.

        Raises:
            UserError: a parameter was replaced, or a tensor of the model is no longer as at the start.
        """
        self.expected.check_parameters(state.model)
        tree = state.state_dict()
        if kept is not None:
            for part in ("model", "buffers"):
                tree[part] = {name: kept.get(name, value) for name, value in tree[part].items()}
        tensors, plain = take_apart(tree)
        self.expected.check(tensors)
        data_tensors, plain_data = take_apart({DATA_STATES: list(data_states)})
        return tensors | data_tensors, {**self.facts, "state": plain, **plain_data}

    def refuse_not_finite(
        self, tensors: Mapping[str, Tensor], step: int, agreement: Agreement, dist: Dist
    ) -> None:
        """Raise NonFiniteError on every rank if any has a NaN or Inf that was not there at the start."""
        for rank, theirs in enumerate(agreement.gather(self.expected.new_in(tensors))):
            if theirs:
                names = first_few((name.removeprefix("model.") for name in theirs), 1)
                kind = " and ".join(sorted(next(iter(theirs.values()))))
                raise NonFiniteError(
                    f"{names} holds {kind} after step {step} on {dist.describe(rank)}; nothing of that step "
                    "is saved. Lower optim.lr, or set train.clip_grad_norm; resume=auto continues from "
                    "the checkpoint before",
                    ranks=(rank,),
                )
