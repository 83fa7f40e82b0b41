"""Files of the safetensors library, which is optional: ``pip install ringmaster-trainer[safetensors]``."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from trainer.checkpoint.reading import PlainFile
from trainer.errors import UserError
from trainer.files.untrusted import reason

try:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file
except ImportError:
    _INSTALLED = False
else:
    _INSTALLED = True


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The CPU tensors of ``path``. UserError if it is missing, malformed, or the library is."""
    _require_library(path)
    with PlainFile(path, follow_links=True) as file:
        try:
            return load_file(file.descriptor_path, device="cpu")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is not readable as safetensors: {reason(error)}") from error


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path``; tied weights, which share their memory, are written twice."""
    _require_library(path)
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    except (SafetensorError, KeyError, ValueError) as error:  # a dtype that it has no name for
        raise UserError(f"{path} cannot be written as safetensors: {reason(error)}") from error


def _require_library(path: Path) -> None:
    if not _INSTALLED:
        raise UserError(f"{path} needs the safetensors library: pip install safetensors")
