"""A checkpoint opened for reading: its facts and its tensors."""

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
ADAPTERS = "adapters"  # of peft: their configuration, and by their names in its files those in this one
DATA_STATES = "places"  # where the data of each rank stands
LEFT_OUT = "left_out"  # the sha256 of parameters that are not in it, by their names
COMPACT_INDEX = 5  # the first format version whose index names no chunks
_NUM_THREADS = 4
_BUFFER_BYTES = 1 << 25


@dataclass(frozen=True)
class OpenCheckpoint:
    """What ``open`` found in a directory.

    Attributes:
        facts: strategy, world_size, torch_version, config, and the JSON parts of state and data_states.
        index: where each tensor is.
    """

    directory: Location
    manifest: Manifest
    facts: dict[str, Any]
    index: Index
    _headers: dict[str, dict[str, Stored]] = field(default_factory=dict)  # by file, of those that were opened

    @classmethod
    def open(cls, directory: Location, manifest: Manifest | None = None) -> "OpenCheckpoint":
        """Read all but the tensors.

        Raises:
            UserError: ``directory`` cannot be read, or is not a checkpoint. Reading a tensor raises it if
                that is missing.
        """
        manifest = manifest or read_manifest(directory)
        digest = manifest.files[STATE]
        with open_listed(directory, manifest, STATE) as file:
            check_blocks(file, digest, range(len(digest.sha256)))
            facts = read_json(directory / STATE, file.read())
        facts["state"]["model"] |= {name: {"$tensor": f"model.{name}"} for name in facts[LEFT_OUT]}
        written = facts.pop("tensors")
        is_compact = manifest.format_version >= COMPACT_INDEX
        index = index_from_json(written) if is_compact else index_of_version_4(written)
        return cls(directory, manifest, facts, index)

    @property
    def shapes(self) -> Shapes:
        """The shape and dtype of each tensor of the state, by its name."""
        return {
            name: (entry.shape, entry.dtype)
            for name, entry in self.index.items()
            if not name.startswith(f"{DATA_STATES}.")
        }

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that saved this, by their dotted names."""
        config: dict[str, Any] = self.facts["config"]
        return config

    @property
    def left_out(self) -> Mapping[str, str]:
        """The sha256 of frozen parameters that are in `initial_weights`, and not here, by their names."""
        found: dict[str, str] = self.facts[LEFT_OUT]
        return found

    @property
    def initial_weights(self) -> str:
        """The setting by which the run began with weights."""
        path = self.config.get("model.init_from")
        return f"model.init_from={path}" if path else f"model.weights={self.config.get('model.weights')}"

    @property
    def progress(self) -> Progress:
        """The run's progress, in a new object."""
        return Progress(**self.facts["state"]["progress"])

    @property
    def trained(self) -> set[str]:
        """The names of the parameters that the optimizer of the run had."""
        return {
            name for group in self.facts["state"]["optimizer"]["param_groups"] for name in group["params"]
        }

    def data_states(self) -> list[dict[str, Any]]:
        """Where the data of each rank stands, from its loader."""
        found = self.read_named([name for name in self.index if name.startswith(f"{DATA_STATES}.")])
        copies = {name: tensor.clone() for name, tensor in found.items()}  # a stream may keep them
        states: list[dict[str, Any]] = put_together(self.facts[DATA_STATES], copies)
        return states

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the tensors by their names: full ones, or this rank's rows of sharded ones.

        Those that were left out keep their values.
        """
        by_file: dict[str, list[tuple[str, Chunk, int, Tensor]]] = {}
        for name, target in targets.items():
            (begin, end), here = own_rows(target), to_local(target)
            for chunk in self.index[name].overlapping(begin, end) if name in self.index else ():
                first, last = max(begin, chunk.begin), min(end, chunk.begin + num_rows(chunk.shape))
                rows = here[first - begin : last - begin] if here.ndim else here
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
        """The full tensors with names that begin with ``prefix``, by the rest of the name. Not collective.

        A tensor that was saved as one chunk is mapped from its file and read when used.
        """
        found = self.read_named([name for name in self.shapes if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def read_named(self, names: list[str]) -> dict[str, Tensor]:
        """As `read`, but of the tensors of these full names."""
        # And by key, so that a tensor with several names is read once.
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
        whole: dict[tuple[str, str], Tensor] = {}
        found = {}
        for name in names:
            chunks = self.index[name].chunks
            first = chunks[0].file, chunks[0].key
            if first not in whole:
                of = [parts.pop((chunk.file, chunk.key)) for chunk in chunks]
                whole[first] = torch.cat(of) if len(of) > 1 else of[0]
            found[name] = whole[first]
        return found

    def _stored(self, file: PlainFile, name: str, chunk: Chunk) -> Stored:
        """Where a chunk of the tensor ``name`` is in ``file``. UserError if it is not as the index says."""
        if (header := self._headers.get(chunk.file)) is None:
            header = self._headers[chunk.file] = read_header(file)
        stored = header.get(chunk.key)
        if stored is None or (stored.dtype, stored.shape) != stored_as(self.index[name].dtype, chunk.shape):
            raise UserError(f"{printable(chunk.file)} has not the {printable(name)} that {STATE} names")
        return stored

    def weights(self, averaged: bool, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The model's state; with `averaged`, the moving averages that `ema.decay` kept in place of weights.

        Args:
            names: those that are needed; None: all.

        Raises:
            UserError: there are no averages; or as `model_state`.
        """
        averages = self.read("ema.weights.") if averaged else {}
        if averaged and not averages:
            raise UserError(f"{printable(self.directory)} holds no averages: its run had ema.decay=null")
        if names is None:
            weights = self.model_state()
        else:
            found = self.read_named([f"model.{name}" for name in names])
            weights = {name.removeprefix("model."): tensor for name, tensor in found.items()}
        return {name: weights[name] for name in weights if not is_extra_state(name)} | averages

    def model_state(self) -> dict[str, Tensor]:
        """The tensors of the model's state dict. UserError if some are not here."""
        if self.left_out:
            raise UserError(
                f"{printable(self.directory)} leaves out {first_five(self.left_out)}: they are in "
                f"{self.initial_weights} (checkpoint.frozen=false); trainer.load_model(RUN) reads both"
            )
        return self.read("model.")


def _fill(file: PlainFile, offset: int, rows: Tensor, dtype: torch.dtype) -> None:
    """Read the bytes of `rows` from `offset` on: into its memory, or through a buffer."""
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
    """The checkpoint in ``directory``, found to be complete and undamaged.

    With ``num_readers``, each of them checks other blocks of the files.

    Raises:
        UserError: it is not; the message says why.
    """
    return OpenCheckpoint.open(directory, verify(directory, reader, num_readers))


def verified_by_all(directory: Location, agreement: Agreement) -> OpenCheckpoint:
    """As `verified`, each rank its share of the blocks (a collective)."""
    return agreement.everywhere(lambda: verified(directory, agreement.rank, agreement.world_size))


def first_intact(found: Sequence[Location], agreement: Agreement, more: str = "") -> OpenCheckpoint:
    """The first of ``found`` that verifies (a collective); damaged ones are passed over.

    Raises:
        UserError: there is none; with ``more`` at the end.
        NoAccessError, RetryableError: one cannot be read now.
    """
    reasons: list[str] = []
    for directory in found:
        try:
            return verified_by_all(directory, agreement)
        except NoAccessError:  # it may be whole, so an older one would be the wrong one
            raise
        except UserError as error:
            reasons.append(str(error))
            if agreement.rank == 0:
                log.warning("passing over %s: %s", directory.name, error)
    where = printable(found[0].parent)
    raise UserError(f"none of the {len(found)} checkpoints in {where} is intact: {reasons[0]}{more}")
