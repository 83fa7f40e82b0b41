"""What is saved at a fault where each rank holds a shard only: the copies of all shards in memory."""

from collections.abc import Mapping

from trainer.checkpoint import Checkpointer
from trainer.checkpoint.copies import Copy
from trainer.checkpoint.mirror import Mirror
from trainer.data.loading.base import TrainLoader
from trainer.distributed.process_group import Dist
from trainer.errors import UserError
from trainer.faults.gate import UPDATE_S, Gate


class MirroredStep(Gate):
    """The gate of a run with `checkpoint.mirror_every`, and what the watch saves.

    A rank that is left saves the copies of all, of which those of dead ranks are whole, too.
    """

    why_not: str | None = None
    any_side = True  # all hold copies of the same shards

    def __init__(self, dist: Dist, mirror: Mirror, checkpointer: Checkpointer, loader: TrainLoader) -> None:
        super().__init__(dist.heartbeat)
        self._mirror, self._checkpointer, self._loader = mirror, checkpointer, loader
        self._is_taken = False
        self._copies: Mapping[int, Copy] = {}

    def begin_update(self) -> None:
        self._mirror.wait()  # without the lock, which a save at a fault would wait for
        super().begin_update()

    def keep(self) -> None:
        self._mirror.keep(self._loader.state_dict())

    def freeze(self, failed: bool) -> int:
        # The copies are whole without the gate; with it, none is replaced while it is written.
        self._is_taken = self._is_taken or self.take(timeout_s=0.5 if failed else UPDATE_S)
        saved = self._checkpointer.newest_step()
        on_disk = f"the newest on disk is of step {saved}" if saved else "there is none on disk"
        try:
            self._copies = self._mirror.newest()
        except UserError as error:
            raise UserError(f"{error}; {on_disk}") from error
        step = next(iter(self._copies.values())).step
        if saved is not None and step < saved <= self._heartbeat.finished:
            raise UserError(f"the copies in memory are of step {step}; {on_disk}")
        return step

    def fingerprint(self) -> int | None:
        return None

    def close(self) -> None:
        self._mirror.close()

    def save(self) -> bool:
        self._heartbeat.enter("rescue")
        return self._checkpointer.save_copies(self._copies)
