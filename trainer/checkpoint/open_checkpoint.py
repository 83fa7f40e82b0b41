"""A checkpoint that is open for reading."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.layout import Chunk, Index, Shapes, index_from_json, index_of_version_4
from trainer.checkpoint.manifest import Manifest, check_blocks, open_listed, read_manifest, verify
from trainer.checkpoint.reading import PlainFile
from trainer.checkpoint.safetensors_files import Stored, as_tensor, read_header, stored_as
from trainer.checkpoint.tree import is_extra_state, put_together
from trainer.distributed.agreement import Agreement
from trainer.errors import NoAccessError, UserError
from trainer.files.address import Location
from trainer.files.untrusted import first_five, printable, read_json
from trainer.state.train_state import Progress
from trainer.tensors.bits import as_bytes
from trainer.tensors.local_shard import num_rows, own_rows, to_local

log = logging.getLogger(__name__)

STATE = "state.json"
# Keys of the facts, which are the contents of that file without its index of tensors:
MODEL_CONFIG = "model_config"  # the config.json of a Hugging Face model
ADAPTERS = "adapters"  # PEFT's configuration, and the names of adapters in the model by PEFT's names
DATA_STATES = "places"  # the data position of each rank
LEFT_OUT = "left_out"  # the sha256 of parameters that the checkpoint does not contain, by name
COMPACT_INDEX = 5  # the first format version whose index does not list chunks
_NUM_THREADS = 4
_BUFFER_BYTES = 1 << 25


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose manifest and state.json have been read.

    Attributes:
        facts: strategy, world_size, torch_version, config, and those parts of state and data_states that are
            not tensors.
        index: the location of each tensor.
    """

    directory: Location
    manifest: Manifest
    facts: dict[str, Any]
    index: Index
    _headers: dict[str, dict[str, Stored]] = field(default_factory=dict)  # of the files opened so far

    @classmethod
    def open(cls, directory: Location, manifest: Manifest | None = None) -> "OpenCheckpoint":
        """Read the manifest and state.json of a checkpoint, but no tensors.

        Raises:
            UserError: if ``directory`` cannot be read or is not a checkpoint. Methods that read tensors raise
                it if a tensor is missing.
        """
        manifest = manifest or read_manifest(directory)
        digest = manifest.files[STATE]
        with open_listed(directory, manifest, STATE) as file:
            check_blocks(file, digest, range(len(digest.sha256)))
            facts = read_json(directory / STATE, file.read())
        facts["state"]["model"] |= {name: {"$tensor": f"model.{name}"} for name in facts[LEFT_OUT]}
        saved_index = facts.pop("tensors")
        is_compact = manifest.format_version >= COMPACT_INDEX
        index = index_from_json(saved_index) if is_compact else index_of_version_4(saved_index)
        return cls(directory, manifest, facts, index)

    @property
    def shapes(self) -> Shapes:
        """The shape and dtype of each tensor of the state, by name."""
        return {
            name: (entry.shape, entry.dtype)
            for name, entry in self.index.items()
            if not name.startswith(f"{DATA_STATES}.")
        }

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that saved this checkpoint, by dotted name."""
        config: dict[str, Any] = self.facts["config"]
        return config

    @property
    def left_out(self) -> Mapping[str, str]:
        """The sha256 of each frozen parameter that is only in `initial_weights`, by name."""
        digests: dict[str, str] = self.facts[LEFT_OUT]
        return digests

    @property
    def initial_weights(self) -> str:
        """The setting that gave the run its initial weights."""
        path = self.config.get("model.init_from")
        return f"model.init_from={path}" if path else f"model.weights={self.config.get('model.weights')}"

    @property
    def progress(self) -> Progress:
        return Progress(**self.facts["state"]["progress"])

    @property
    def trained(self) -> set[str]:
        """The names of the parameters that the run's optimizer updated."""
        return {
            name for group in self.facts["state"]["optimizer"]["param_groups"] for name in group["params"]
        }

    def data_states(self) -> list[dict[str, Any]]:
        """Return the data position of each rank, as its loader saved it."""
        tensors = self.read_named([name for name in self.index if name.startswith(f"{DATA_STATES}.")])
        copies = {name: tensor.clone() for name, tensor in tensors.items()}  # a stream may change them
        states: list[dict[str, Any]] = put_together(self.facts[DATA_STATES], copies)
        return states

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill `targets` in place with the tensors of the same names; sharded targets get this rank's shard.

        Parameters that were not saved (`left_out`) keep their values.
        """
        by_file: dict[str, list[tuple[str, Chunk, int, Tensor]]] = {}
        for name, target in targets.items():
            (begin, end), local = own_rows(target), to_local(target)
            for chunk in self.index[name].overlapping(begin, end) if name in self.index else ():
                first, last = max(begin, chunk.begin), min(end, chunk.begin + num_rows(chunk.shape))
                rows = local[first - begin : last - begin] if local.ndim else local
                by_file.setdefault(chunk.file, []).append((name, chunk, first - chunk.begin, rows))
        with torch.no_grad(), ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint") as threads:
            for file_name, parts in by_file.items():
                with open_listed(self.directory, self.manifest, file_name) as file:
                    reads: list[Future[None]] = []
                    for name, chunk, row, rows in parts:
                        stored = self._stored(file, name, chunk)
                        offset = stored.begin + row * ((stored.end - stored.begin) // num_rows(chunk.shape))
                        reads.append(threads.submit(_fill, file, offset, rows, self.index[name].dtype))
                    for read in reads:
                        read.result()

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors under ``prefix`` in full, by the rest of their names (not a collective).

        A tensor that was saved as one chunk is memory-mapped.
        """
        tensors = self.read_named([name for name in self.shapes if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def read_named(self, names: list[str]) -> dict[str, Tensor]:
        """Return the tensors with these names in full, like `read`."""
        # The inner key is the name in the file, so that a tensor with several names is read once.
        by_file: dict[str, dict[str, tuple[str, Chunk]]] = {}
        for name in names:
            for chunk in self.index[name].chunks:
                by_file.setdefault(chunk.file, {})[chunk.key] = name, chunk
        parts: dict[tuple[str, str], Tensor] = {}
        for file_name, needed in sorted(by_file.items()):
            with open_listed(self.directory, self.manifest, file_name) as file:
                for name, chunk in needed.values():
                    stored, dtype = self._stored(file, name, chunk), self.index[name].dtype
                    data = file.part(stored.begin, stored.end)
                    parts[file_name, chunk.key] = as_tensor(data, dtype, chunk.shape)
        full: dict[tuple[str, str], Tensor] = {}  # by the file and key of the first chunk
        tensors = {}
        for name in names:
            chunks = self.index[name].chunks
            first = chunks[0].file, chunks[0].key
            if first not in full:
                own_parts = [parts.pop((chunk.file, chunk.key)) for chunk in chunks]
                full[first] = torch.cat(own_parts) if len(own_parts) > 1 else own_parts[0]
            tensors[name] = full[first]
        return tensors

    def _stored(self, file: PlainFile, name: str, chunk: Chunk) -> Stored:
        if (header := self._headers.get(chunk.file)) is None:
            header = self._headers[chunk.file] = read_header(file)
        stored = header.get(chunk.key)
        if stored is None or (stored.dtype, stored.shape) != stored_as(self.index[name].dtype, chunk.shape):
            raise UserError(
                f"{printable(chunk.file)} does not contain {printable(name)} with the dtype and shape that "
                f"{STATE} lists"
            )
        return stored

    def weights(self, averaged: bool, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model.

        Args:
            averaged: return the moving averages (`ema.decay`) in place of the weights.
            names: the tensors to return; None for all.

        Raises:
            UserError: if the checkpoint lacks averages or frozen parameters.
        """
        averages = self.read("ema.weights.") if averaged else {}
        if averaged and not averages:
            raise UserError(no_averages(self.directory))
        if names is None:
            weights = self.model_state()
        else:
            tensors = self.read_named([f"model.{name}" for name in names])
            weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return {name: weights[name] for name in weights if not is_extra_state(name)} | averages

    def model_state(self) -> dict[str, Tensor]:
        """Return the tensors of the model's state dict. Raise UserError if frozen parameters are missing."""
        if self.left_out:
            raise UserError(
                f"{printable(self.directory)} does not contain {first_five(self.left_out)}, because its run "
                f"had checkpoint.frozen=false: they are in {self.initial_weights}; use "
                "trainer.load_model(RUN), which reads both"
            )
        return self.read("model.")


def no_averages(directory: Location) -> str:
    return f"{printable(directory)} contains no moving averages, because its run had ema.decay=null"


def _fill(file: PlainFile, offset: int, rows: Tensor, dtype: torch.dtype) -> None:
    """Read the bytes at `offset` into `rows`, through a buffer if the device or the dtype requires it."""
    if rows.is_cpu and rows.is_contiguous() and rows.dtype == dtype:
        file.read_into(offset, as_bytes(rows))
        return
    row_bytes = max(1, rows[:1].numel() * dtype.itemsize) if rows.ndim else dtype.itemsize
    for some in rows.split(max(1, _BUFFER_BYTES // row_bytes)) if rows.ndim else (rows,):
        memory = torch.empty(some.shape, dtype=dtype)
        file.read_into(offset, as_bytes(memory))
        some.copy_(memory)
        offset += memory.numel() * dtype.itemsize


def verified(directory: Location, reader: int = 0, num_readers: int = 1) -> OpenCheckpoint:
    """Verify and open the checkpoint in ``directory``; each of several readers verifies a part."""
    return OpenCheckpoint.open(directory, verify(directory, reader, num_readers))


def verified_by_all(directory: Location, agreement: Agreement) -> OpenCheckpoint:
    """Verify and open a checkpoint, with the files divided among the ranks (a collective)."""
    return agreement.everywhere(lambda: verified(directory, agreement.rank, agreement.world_size))


def first_intact(paths: Sequence[Location], agreement: Agreement, more: str = "") -> OpenCheckpoint:
    """Return the first intact checkpoint of ``paths``; skip damaged ones (a collective).

    Args:
        more: the end of the error message.

    Raises:
        UserError: if none is intact.
        NoAccessError, RetryableError: if a checkpoint cannot be read now.
    """
    reasons: list[str] = []
    for directory in paths:
        try:
            return verified_by_all(directory, agreement)
        except NoAccessError:  # it may be intact, so an older one would be the wrong choice
            raise
        except UserError as error:
            reasons.append(str(error))
            if agreement.rank == 0:
                log.warning("skipping %s: %s", directory.name, error)
    where = printable(paths[0].parent)
    raise UserError(f"none of the {len(paths)} checkpoints in {where} is intact: {reasons[0]}{more}")
