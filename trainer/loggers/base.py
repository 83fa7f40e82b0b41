"""The interface of loggers, which any class may implement: `logger.mine._target_=mine.Logger`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("scalars", "text", "image", "figure", "histogram", "close")


class Logger:
    """A logger that does nothing: inherit the methods you do not need, or write a class with all of them.

    A logger is created on rank 0 only, from the keys of its `logger.NAME` setting and four more arguments:
    ``run_dir`` (a Path), ``run_id`` (one word, the same when the run is resumed), ``first_step`` (0, or the
    step after which a resumed run continues; later steps are written again) and ``settings`` (a read-only
    mapping by dotted names). Calls come from the training thread, so a slow logger delays all ranks. An
    OSError or UserError ends the run with its message, any other exception with a traceback.
    """

    look = ""
    """The command or URL to view the results; printed as the last line of a run."""

    def __init__(self, **arguments: Any) -> None: ...

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write metrics by name, such as ``train/loss``; values may be NaN or Inf. Steps never decrease."""

    def text(self, name: str, text: str, step: int) -> None:
        """Write a text, in Markdown."""

    def image(self, name: str, image: Tensor, step: int) -> None:
        """Write an image on the CPU: (1 or 3, height, width), uint8, or floats in [0, 1]."""

    def figure(self, name: str, figure: "Figure", step: int) -> None:
        """Write a matplotlib figure."""

    def histogram(self, name: str, counts: Tensor, edges: Tensor, step: int) -> None:
        """Write the number of values between consecutive edges: (n,) and (n + 1,), float64 on the CPU."""

    def close(self) -> None:
        """Write remaining data; called once, after a successful run, and possibly not after a failure."""


def pixels_of(image: Tensor) -> Any:
    """Convert an image passed to `Logger.image` to a NumPy array, uint8 (height, width, 3)."""
    levels = (image * 255).byte() if image.is_floating_point() else image
    return levels.expand(3, -1, -1).permute(1, 2, 0).numpy()
