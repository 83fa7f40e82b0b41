"""A worker's copy of the model: modules wait for their values, gradients leave as soon as they are there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from trainer.comm.exchange.client import Client
from trainer.comm.exchange.layout import Bucket
from trainer.comm.execution.worker import Worker
from trainer.comm.timeline.records import BucketRecord, Timeline


class Replica:
    """Hooks on `model` that pull and push by way of `client`.

    The first forward pass waits for everything and watches which parameters are used before a module that
    owns them is called (`self.head.weight` in the code of another): from then on those are waited for at the
    beginning, and all others when their module's turn comes. A compiled model waits for all.

    Args:
        buckets: as the client has them.
        compiled: whether hooks of modules would cut the graph.
        enter: told `("all_reduce", bucket)` of each bucket before it is handed on.
    """

    def __init__(
        self,
        model: nn.Module,
        client: Client,
        buckets: Sequence[Bucket],
        timeline: Timeline,
        compiled: bool,
        enter: Callable[[str, int], None],
    ) -> None:
        self.client, self.timeline = client, timeline
        self._enter, self._compiled, self._watched = enter, compiled, False
        names = {parameter: name for name, parameter in model.named_parameters()}
        bucket_of = {name: bucket for bucket in buckets if bucket.trainable for name in bucket.names}
        self._buckets = {bucket.index: bucket for bucket in bucket_of.values()}
        self._early: set[int] = set()  # buckets to wait for before anything is computed
        self._waiting: dict[int, int] = {}  # gradients still to come, by bucket, in this backward pass
        self._pushes: list[Future[Any]] = []
        self._pushing = False
        self._worker = Worker(self._push)
        # What an asynchronous exchange says before a push, and after it.
        self.before_push: Callable[[], None] = lambda: None
        self.commit: Callable[[], None] = client.commit
        self._bucket_of = {
            parameter: bucket_of[name].index for parameter, name in names.items() if name in bucket_of
        }
        self._first_uses = _FirstUses(self._bucket_of, self._early)
        for module in model.modules():
            own = {
                self._bucket_of[parameter]
                for parameter in module.parameters(recurse=False)
                if parameter in self._bucket_of
            }
            if own and not compiled:
                module.register_forward_pre_hook(partial(self._settle, sorted(own)))
        for parameter, index in self._bucket_of.items():
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    @contextmanager
    def pass_(self, first: bool, last: bool) -> Iterator[None]:
        """Around a forward and backward pass: the `first` of a step pulls, the `last` pushes."""
        watch: AbstractContextManager[Any] = nullcontext()
        if first:
            self.client.ask()
            if self._watched:
                for index in sorted(self._early):
                    self.client.settle(index)
            else:
                self.client.settle_all()
                watch = nullcontext() if self._compiled else self._first_uses
        self._pushing = self._is_first_push = last
        self._waiting = {index: len(bucket.names) for index, bucket in self._buckets.items()}
        with watch:
            yield
        self._watched = not self._compiled
        if last:
            self._flush()

    def close(self) -> None:
        self._worker.close()

    def _settle(self, indices: Sequence[int], module: nn.Module, inputs: Any) -> None:
        for index in indices:
            self.client.settle(index)
            if not self._watched:
                self._first_uses.called.add(index)

    def _ready(self, index: int, parameter: Tensor) -> None:
        self._waiting[index] -= 1
        if self._pushing and self._waiting[index] == 0:
            self._submit(index)

    def _submit(self, index: int) -> None:
        self._enter("all_reduce", index)
        is_last = len(self._pushes) == len(self._buckets) - 1
        record = self.timeline.arrive(index, self._buckets[index].num_bytes, is_last)
        self._pushes.append(self._worker.submit(self._buckets[index], record))

    def _push(self, bucket: Bucket, record: BucketRecord) -> Tensor:
        if self._is_first_push:
            self._is_first_push = False
            self.before_push()
        self.client.push(bucket.index)
        return _NOTHING

    def _flush(self) -> None:
        """Push what has had no gradient, and wait for all; also for values that nobody has used."""
        self.client.settle_all()
        for index in reversed(self._waiting):
            if self._waiting[index] > 0:
                self._submit(index)
        pushes, self._pushes = self._pushes, []
        with suppress(Exception):  # told in torch's words; the worker has the error itself
            torch.futures.wait_all(pushes)
        if self._worker.error is not None:
            raise self._worker.error
        self.commit()


_NOTHING = torch.empty(0)


class _FirstUses(TorchFunctionMode):
    """Notes the buckets of which a parameter is used before a module that owns one of them was called."""

    def __init__(self, bucket_of: dict[nn.Parameter, int], early: set[int]) -> None:
        super().__init__()
        self.called: set[int] = set()
        self._bucket_of, self._early = bucket_of, early

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, nn.Parameter) and item in self._bucket_of:
                    index = self._bucket_of[item]
                    if index not in self.called:
                        self._early.add(index)
        return func(*args, **(kwargs or {}))
