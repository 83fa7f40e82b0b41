"""What a logger has to offer, so that any class can be one: `logger.mine._target_=mine.Logger`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("scalars", "text", "image", "figure", "histogram", "close")


class Logger:
    """A logger that says nothing: inherit what you have no use for, or write a class with these methods.

    It is built on rank 0 alone, by the keys of its node and by four arguments more: ``run_dir`` (a Path),
    ``run_id`` (one word, the same when the run is resumed), ``first_step`` (0, or the step that a resumed run
    goes on from: it writes those after it again) and ``settings`` (each by its dotted name). Calls
    come from the training thread, so a slow one holds up all ranks. An OSError or UserError ends the run with
    its message, anything else with a traceback.
    """

    look = ""
    """The command or address by which a person looks at what it wrote; the last line of a run says it."""

    def __init__(self, **told: Any) -> None: ...

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Figures by names like ``train/loss``, which may be NaN or Inf; no step follows a later one."""

    def text(self, name: str, text: str, step: int) -> None:
        """A text, in Markdown."""

    def image(self, name: str, image: Tensor, step: int) -> None:
        """A picture on the CPU: (1 or 3, height, width), uint8, or floats within 0..1."""

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        """A figure of matplotlib's."""

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        """How many values lie between one edge and the next: (n,) and (n + 1,), float64 on the CPU."""

    def close(self) -> None:
        """Write what is left; called once, after a run that ended well. A run may end without it."""
