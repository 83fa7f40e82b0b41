"""A worker's copy of the model: modules wait for their values, gradients are sent as soon as they exist."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from trainer.comm.parameter_server.client import Client
from trainer.comm.parameter_server.layout import ShardedBucket
from trainer.comm.timeline import BucketRecord, Timeline
from trainer.comm.transport.worker import Worker
from trainer.errors import UserError, first_few
from trainer.nested import leaves
from trainer.strategies.gradient_hooks import hooks_per_rank_note, num_gradient_hooks
from trainer.turns import Turns

log = logging.getLogger(__name__)


class WorkerCopy:
    """Hooks on `model` that pull and push through `client`.

    A module's values are waited for when it is called, or when the code of another module uses them before
    (`self.head.weight`). A compiled model waits for all. A use that torch shows to no TorchFunctionMode, as
    in a scripted function, torch.func or another thread, finds NaN.

    Args:
        buckets: the client's.
        compiled: whether hooks of modules would split the graph.
        enter: called with `("all_reduce", bucket)` before each bucket is sent.
    """

    def __init__(
        self,
        model: nn.Module,
        client: Client,
        buckets: Sequence[ShardedBucket],
        timeline: Timeline,
        compiled: bool,
        enter: Callable[[str, int], None],
    ) -> None:
        self.client, self.timeline = client, timeline
        self._enter, self._compiled = enter, compiled
        self._model = model
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        bucket_of = {name: bucket for bucket in buckets if bucket.trainable for name in bucket.names}
        self._all = [bucket.index for bucket in buckets]
        self._turns, self._is_later = Turns(len(buckets)), False
        self._buckets = {bucket.index: bucket for bucket in bucket_of.values()}
        # Parameters without a gradient so far in this backward pass, by bucket.
        self._waiting: dict[int, set[Tensor]] = {}
        self._pushes: list[Future[Any]] = []
        self._pushing = False
        self._worker = Worker(self._push)
        self._shares: deque[tuple[float, ...]] = deque(maxlen=100)  # for `typical_share`
        # What an asynchronous exchange sends before a push, and after it.
        self.before_push: Callable[[], None] = lambda: None
        self.commit: Callable[[], None] = client.commit
        self._bucket_of = {
            parameter: bucket_of[name].index
            for name, parameter in model.named_parameters()
            if name in bucket_of
        }
        self._uses: AbstractContextManager[Any] = (
            nullcontext() if compiled else _Uses(self._bucket_of, client)
        )
        for module in model.modules():
            own = {
                self._bucket_of[parameter]
                for parameter in module.parameters(recurse=False)
                if parameter in self._bucket_of
            }
            if own and not compiled:
                module.register_forward_pre_hook(_Settle(client, sorted(own)))
        for parameter, index in self._bucket_of.items():
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
        self._num_hooks = {parameter: num_gradient_hooks(parameter) for parameter in self._bucket_of}

    @contextmanager
    def pass_(self, first: bool, last: bool) -> Iterator[None]:
        """Around a forward and backward pass: the `first` of a step pulls, the `last` pushes."""
        if first:
            self._began, self._blocked_s = time.perf_counter(), self.client.blocked_s
            self.client.ask()
            if self._compiled:
                self.client.settle_all()
        self._pushing = self._is_first_push = last
        self._waiting = {index: set() for index in self._buckets}
        for parameter, index in self._bucket_of.items():
            self._waiting[index].add(parameter)
        with self._uses:
            yield
        if last:
            self.client.settle_all()  # also values that no module used
            self._refuse_changes()
            self._flush()

    def _refuse_changes(self) -> None:
        """Raise UserError if a step's passes replaced or changed parameters, which servers overwrite.

        The first steps compare the values of all, later ones those of one bucket, drawn at random.
        """
        # All ranks ask together after the first step, also about frozen ones.
        due = [self._all[number] for number in self._turns.next()] if self._is_later else list(self._buckets)
        self._is_later = True
        numbers = {p: num_gradient_hooks(p) for p in self._num_hooks}
        if late := [self._names[p] for p, (_, after) in numbers.items() if after != self._num_hooks[p][1]]:
            raise UserError(
                f"strategy=parameter_server: a hook on {', '.join(late[:5])} was registered in mid-run, and "
                "would come after the gradient is sent; call register_post_accumulate_grad_hook in __init__"
            )
        if late := [self._names[p] for p, number in numbers.items() if number != self._num_hooks[p]]:
            log.warning("%s", hooks_per_rank_note(late, "parameter_server"))
        self._num_hooks = numbers
        if names := self.changed(due):
            raise UserError(CHANGES.format(first_few(names)))

    def changed(self, buckets: Sequence[int] | None = None) -> list[str]:
        """The names of replaced parameters, and of those in `buckets`, or in all, with other values."""
        now = dict(self._model.named_parameters())
        replaced = {name for parameter, name in self._names.items() if now.get(name) is not parameter}
        return sorted(replaced.union(*map(self.client.changed, self._all if buckets is None else buckets)))

    def typical_share(self) -> dict[str, float]:
        """Medians over the newest shares of steps, as in result.json; {} without one.

        Computing until the last values were needed; computing from the first gradients that could be sent to
        the last; blocked, for values, for gradients to be sent and for servers.
        """
        times = [1e3 * median(seconds) for seconds in zip(*self._shares, strict=True)]
        named = dict(zip(("forward_ms", "backward_ms", "blocked_ms"), times, strict=False))
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets.values())
        return {"bytes": num_bytes, "buckets": len(self._buckets), **named} if named else {}

    def close(self) -> None:
        self._worker.close()

    def _ready(self, index: int, parameter: Tensor) -> None:
        waiting = self._waiting[index]
        if parameter not in waiting:
            raise UserError(
                f"strategy=parameter_server sends a gradient as soon as it exists, but that of "
                f"{self._names[parameter]} came in several parts of one backward pass, as with reentrant "
                "activation checkpoints; use torch.utils.checkpoint's use_reentrant=False"
            )
        waiting.remove(parameter)
        if self._pushing and not waiting:
            self._submit(index)

    def _submit(self, index: int) -> None:
        self._enter("all_reduce", index)
        is_last = len(self._pushes) == len(self._buckets) - 1
        record = self.timeline.arrive(index, self._buckets[index].num_bytes, is_last)
        if not self._pushes:
            self._first_ready = record.ready
        self._pushes.append(self._worker.put(self._buckets[index], record))

    def _push(self, bucket: ShardedBucket, record: BucketRecord) -> Tensor:
        if self._is_first_push:
            self._is_first_push = False
            self.before_push()
        self.client.push(bucket.index)
        return _NOTHING

    def _flush(self) -> None:
        """Push buckets without gradients, and wait for all."""
        for index in reversed(self._waiting):
            if self._waiting[index]:
                self._submit(index)
        ready, forward_s = time.perf_counter(), self.client.settled_at - self._began
        pulled_s = self.client.blocked_s - self._blocked_s
        pushes, self._pushes = self._pushes, []
        with suppress(Exception):  # torch's version; the worker has the original error
            torch.futures.wait_all(pushes)
        if self._worker.error is not None:
            raise self._worker.error
        self.client.blocked_s += time.perf_counter() - ready
        if self.client.pushed_nan():
            log.warning("%s", UNSEEN)
        self.commit()
        blocked_s = self.client.blocked_s - self._blocked_s
        self._shares.append((forward_s - pulled_s, ready - self._first_ready, blocked_s))


_NOTHING = torch.empty(0)
# Each step looks at some gradients before its loss, which needs no values.
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
CHANGES = (
    "strategy=parameter_server: a forward or backward pass or the loss makes or changes {}: no server would "
    "hold that, nor a checkpoint; make parameters in __init__, and change none, or use strategy=ddp"
)


UNSEEN = (
    "gradients are NaN. If data and learning rate are not to blame, the model uses parameters where "
    "strategy=parameter_server does not see it, and finds NaN in place of values that have not come: in a "
    "scripted function, torch.func.grad, another thread, an alias made in __init__, or a backward hook. Call "
    "the module that holds them, or use strategy=ddp"
)


class _Settle:
    """A forward pre-hook that waits for a module's values; a copy of the module has it, too."""

    def __init__(self, client: Client, indices: Sequence[int]) -> None:
        self._client, self._indices = client, indices

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        for index in self._indices:
            self._client.settle(index)

    def __deepcopy__(self, memo: Any) -> "_Settle":
        return self


class _Uses(TorchFunctionMode):
    """Waits for the values of a parameter when any code uses them."""

    def __init__(self, bucket_of: Mapping[nn.Parameter, int], client: Client) -> None:
        super().__init__()
        self._bucket_of, self._client = bucket_of, client

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._client.awaits and func != _GRADIENT:
            for value in leaves((args, kwargs)):
                if isinstance(value, nn.Parameter) and value in self._bucket_of:
                    self._client.settle(self._bucket_of[value])
        return func(*args, **kwargs)
