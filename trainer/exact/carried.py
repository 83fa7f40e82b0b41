"""What a leaf must not leave to the next one, which may be on another rank."""

from typing import Any

from torch import nn

from trainer.errors import UserError
from trainer.fingerprint import fingerprint, generators
from trainer.local_shard import bit_sums, is_dtensor

_WEIGHT = "change weights in the optimizer alone, or compute with another tensor (weight.clamp(-c, c))"
_EXTRA = "keep it in a buffer (register_buffer)"
_GENERATOR = "draw from torch's, NumPy's or Python's global generator, which is seeded for each part"


class Carried:
    """Looks, in the first step of a start, for changes by forward and backward passes.

    These are of parameters, extra state and random generators that modules keep; buffers have a mean. Reads
    each parameter twice, but no shards, whose gathered copies are looked at by their strategy.

    Args:
        model: unwrapped, where its parameters stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, dict[str, tuple[Any, str]]()
        self._is_whole = not any(is_dtensor(parameter) for parameter in model.parameters())
        self._is_done = False

    def begin_step(self) -> None:
        if not self._is_done:
            self._before = self._found()

    def finish_step(self) -> None:
        """Called after the last backward pass, before the update.

        Raises:
            UserError: a pass has changed something.
        """
        now = {} if self._is_done else self._found()
        for name, (value, way_out) in self._before.items():
            if now.get(name, (None,))[0] != value:
                raise UserError(
                    f"train.exact: a forward or backward pass changes {name}, and each part of the batch "
                    "would find what those before it on its rank have left; "
                    f"{way_out}, or set train.exact=null"
                )
        self._is_done, self._before = True, {}

    def _found(self) -> dict[str, tuple[Any, str]]:
        """By name: what can be compared, and what else to do."""
        sums = bit_sums(self._model.named_parameters()) if self._is_whole else {}
        found: dict[str, tuple[Any, str]] = {name: (total, _WEIGHT) for name, total in sums.items()}
        for name, module in self._model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                title = f"what get_extra_state() of {name or type(module).__name__} gives"
                found[title] = fingerprint(module.get_extra_state()), _EXTRA
        for place, (_, state) in generators(self._model).items():
            found[f"the random generator {place.strip('.')}"] = state, _GENERATOR
        return found
