"""Parameters that user code freezes or thaws while a run trains."""

import logging

from torch import nn

from trainer.errors import first_few
from trainer.optim.plain_names import parameter_names

log = logging.getLogger(__name__)


class Frozen:
    """Which parameters are trained when a run begins: the optimizer has those, and no checkpoint says which.

    Args:
        model: unwrapped, as this process computes with it.
    """

    _told_thawed = False

    def __init__(self, model: nn.Module) -> None:
        named = list(parameter_names(model))
        self._frozen = {name: p for name, p in named if not p.requires_grad}
        self._trained = {name: p for name, p in named if p.requires_grad}

    def drop_gradients(self) -> None:
        """Drop those of frozen parameters that user code has thawed: no update would clear them.

        Called after the last backward pass of a step. Warns of the first that was thawed or frozen.
        """
        thawed = [name for name, parameter in self._frozen.items() if parameter.grad is not None]
        for name in thawed:
            self._frozen[name].grad = None
        if thawed and not self._told_thawed:
            self._told_thawed = True
            log.warning(
                "%s was frozen when the run began and now requires a gradient: it is not trained for that. "
                "Begin another run with it trained, from this one's weights (model.init_from)",
                first_few(thawed, 1),
            )
        if frozen := [name for name, parameter in self._trained.items() if not parameter.requires_grad]:
            self._trained = {}  # once is enough
            log.warning(
                "%s was trained when the run began and now requires no gradient. No checkpoint holds that: a "
                "resumed run trains it until this code freezes it again. To freeze it for good, begin "
                "another run with model.freeze, from this one's weights (model.init_from)",
                first_few(frozen, 1),
            )
