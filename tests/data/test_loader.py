"""Batches are the same for any number of workers, ranks and resumes; broken samples are named or skipped."""

import errno
import logging
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children, current_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from tests.data.settings import eval_loader, message_of, train_loader
from tests.ranks import RankFailure, run_ranks
from trainer.config.instantiate import instantiate
from trainer.data import Mixture
from trainer.data.digits import Digits
from trainer.data.loading.reader import checksum
from trainer.data.loading.worker import WorkerError
from trainer.errors import UserError


class KeepsGenerator(Dataset[float]):
    """Uses its own generator, or a generator per index."""

    def __init__(self, draws: bool) -> None:
        self.draws, self.rng, self.shared = draws, np.random.default_rng(0), torch.default_generator

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        if not self.draws:
            self.rng = np.random.default_rng(index)
        return self.rng.normal() + float(torch.rand((), generator=self.shared))


class EpochNumbers(Dataset[int]):
    """Each sample is the number of the epoch that was set."""

    epoch = -1

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_set_epoch_is_called_also_in_persistent_workers(workers: int) -> None:
    mixed = Mixture("train", [lambda split: EpochNumbers(), lambda split: Subset(EpochNumbers(), range(8))])
    for dataset in (EpochNumbers(), Subset(EpochNumbers(), range(8)), mixed):
        loader = train_loader(dataset, 4, num_workers=workers)
        for epoch in (3, 4):
            assert torch.cat(list(loader.epoch(epoch))).unique().tolist() == [epoch]


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is i plus noise from each of the three generators; some samples cannot be read."""

    def __init__(self, num_samples: int = 24, broken: tuple[int, ...] = ()) -> None:
        self.num_samples = num_samples
        self.broken = broken

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.broken:
            raise OSError(f"folder/{index}.png: truncated")
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([index + part / 2 for part in noise]), index


def epoch(loader: Any, number: int = 0, first_sample: int = 0) -> list[torch.Tensor]:
    return [inputs for inputs, _ in loader.epoch(number, first_sample)]


def indices(batches: Any) -> list[int]:
    return [index for _, labels in batches for index in labels.tolist()]


@pytest.mark.parametrize("persistent", [True, False])
def test_augmentation_does_not_depend_on_workers(persistent: bool) -> None:
    alone, helped = (
        train_loader(Noisy(), 8, seed=5, num_workers=n, persistent_workers=persistent) for n in (0, 2)
    )
    for number in (0, 1):
        assert torch.equal(torch.stack(epoch(alone, number)), torch.stack(epoch(helped, number)))
    # ... and epochs, samples and the three generators differ from one another
    values = torch.cat(epoch(alone, 0) + epoch(alone, 1))
    noise = values - values.floor()
    assert noise.unique().numel() == noise.numel()


def test_augmentation_does_not_depend_on_world_size_or_resumes() -> None:
    whole = torch.stack(epoch(train_loader(Noisy(), 8), 3))
    for replica in (0, 1):
        half = torch.stack(epoch(train_loader(Noisy(), 8, 2, replica, micro=2), 3, first_sample=8))
        assert torch.equal(whole[1:, replica::2].flatten(0, 1), half.flatten(0, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_epoch_does_not_affect_the_next(workers: int) -> None:
    loader, fresh = (train_loader(Noisy(), 4, num_workers=workers) for _ in range(2))
    left = loader.epoch(0)
    left.take()
    assert torch.equal(torch.stack(epoch(loader, 1)), torch.stack(epoch(fresh, 1)))


@pytest.mark.parametrize("dataset", [Noisy(), Digits("train")])
def test_reading_does_not_change_the_processs_generators(dataset: Any) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    for _ in train_loader(dataset, 8).epoch(0):
        assert states() == before
    for _ in eval_loader(dataset, 8):
        assert states() == before


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Write warnings to stderr, also in data workers."""
    with os.fdopen(os.dup(2), "w") as stream:  # which data workers inherit
        handler = logging.StreamHandler(stream)
        logging.getLogger("trainer").addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger("trainer").removeHandler(handler)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dataset_that_draws_from_its_own_generator_is_named_once(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    for draws in (True, False):
        loader = train_loader(KeepsGenerator(draws), 8, num_workers=workers)
        with warnings_on_stderr():
            for number in range(2):
                list(loader.epoch(number))
        named = "sample 0 of KeepsGenerator differs when it is read twice with the same random numbers"
        assert capfd.readouterr().err.count(named) == draws


def test_subsets_and_lists_of_samples_are_batched() -> None:
    """Subset has `__getitems__` for any dataset: one with random samples must still be seeded."""

    class Listed(Noisy):
        def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
            return [(torch.tensor([float(index)]), index) for index in indices]

    [(inputs, labels)] = list(train_loader(Listed(8), 8).epoch(0))
    assert inputs.squeeze(1).tolist() == labels.tolist()
    subset = train_loader(Subset(Noisy(), range(8)), 8)
    assert torch.equal(epoch(subset)[0], epoch(subset)[0])
    [(images, _)] = list(train_loader(Subset(Digits("train"), range(8)), 8).epoch(0))
    assert images.shape == (8, 1, 8, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_sample_is_one_message(workers: int) -> None:
    for batches in (
        train_loader(Noisy(broken=(13,)), 8, num_workers=workers).epoch(0),
        iter(eval_loader(Noisy(broken=(13,)), 8, num_workers=workers)),
    ):
        assert message_of(batches) == (
            "sample 13 of Noisy cannot be read: folder/13.png: truncated; "
            "fix it, or set data.on_bad_sample=skip"
        )


def fail(*_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def test_a_disk_error_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "__getitem__", fail)
    with pytest.raises(OSError, match="Input/output error"):
        list(train_loader(Noisy(), 8).epoch(0))
    with pytest.raises(OSError, match="Input/output error"):
        instantiate("data.dataset", {"_target_": f"{__name__}.fail"})


@pytest.mark.parametrize("workers", [0, 2])
def test_training_replaces_a_bad_sample_with_the_next(workers: int) -> None:
    loader = train_loader(Noisy(broken=(13, 14, 23)), 8, num_workers=workers, on_bad_sample="skip")
    batches = list(loader.epoch(0))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    assert indices(batches) == [{13: 15, 14: 15, 23: 0}.get(index, index) for index in order]
    assert loader.num_skipped == 4  # 13 led to 14
    list(loader.epoch(1))
    assert loader.num_skipped == 8


def test_evaluation_omits_a_bad_sample() -> None:
    loader = eval_loader(Noisy(10, broken=(3, 8, 9)), 2, on_bad_sample="skip")
    batches = list(loader)
    assert indices(batch for batch, which in batches if which) == [0, 1, 2, 4, 5, 6, 7]
    assert [which for _, which in batches] == [[0, 1], [2], [4, 5], [6, 7], []]
    assert loader.num_skipped == 3


def test_only_broken_samples_is_an_error_not_a_loop() -> None:
    with pytest.raises(UserError, match="100 samples in a row from index"):
        list(train_loader(Noisy(200, broken=tuple(range(200))), 8, on_bad_sample="skip").epoch(0))


def test_an_error_in_code_does_not_count_as_a_bad_sample() -> None:
    class Mistaken(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        list(train_loader(Mistaken(), 8, on_bad_sample="skip").epoch(0))


class OwnError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, first: str, second: Any) -> None:
        super().__init__(first)
        self.second = second


class Ends(Noisy):
    def __init__(self, end: BaseException) -> None:
        super().__init__()
        self.end = end

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 13:
            raise self.end
        return super().__getitem__(index)


def test_a_workers_error_is_reported_with_its_message_and_line() -> None:
    """Errors for which torch loses a worker or its message."""
    for end, words in (
        (SystemExit(7), "SystemExit: 7"),
        (OwnError("alas", threading.Lock()), "OwnError: alas"),
    ):
        error, place = _error_of(train_loader(Ends(end), 8, num_workers=1))
        assert error.startswith(f"a data worker raised {words}\nTraceback (most recent call last):\n")
        assert re.fullmatch(r"tests/data/test_loader.py:\d+ in __getitem__", place)


def _error_of(loader: Any) -> tuple[str, str]:
    """Return the text of the exception. The exception itself would keep its frames and their workers."""
    try:
        epoch(loader)
    except WorkerError as error:
        return str(error), str(error.where)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("dataset_class", [Noisy, Digits])
@pytest.mark.parametrize(("num_samples", "replicas", "batch"), [(10, 3, 2), (3, 8, 2), (16, 4, 4)])
def test_evaluation_counts_every_sample_once(
    dataset_class: Any, num_samples: int, replicas: int, batch: int
) -> None:
    dataset = Noisy(num_samples) if dataset_class is Noisy else Subset(Digits("eval"), range(num_samples))
    ranks = [list(eval_loader(dataset, batch, replicas, replica)) for replica in range(replicas)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(labels) > 0 for batches in ranks for (_, labels), _ in batches)  # fillers have samples too
    real = [labels for batches in ranks for (_, labels), which in batches if which]
    assert sorted(torch.cat(real).tolist()) == sorted(dataset[i][1] for i in range(num_samples))
    if num_samples < replicas:
        assert [which for _, which in ranks[-1]] == [[]]


def test_an_empty_evaluation_set_is_refused() -> None:
    with pytest.raises(UserError, match="the validation data is empty"):
        list(eval_loader(Noisy(0), 8))


def started_workers() -> Iterator[Any]:
    """Return the rest of an epoch of ten batches, after the first batch of each of two workers."""
    batches = train_loader(Noisy(80), 8, num_workers=2).epoch(0)
    batches.take()
    batches.take()
    return batches


def _interrupted_epoch() -> tuple[int, int]:
    """Signal the workers' session as a launcher would; return how many workers live, and the other batches."""
    batches = started_workers()
    pids = " ".join(str(worker.pid) for worker in active_children())
    subprocess.run(
        ["sh", "-c", f"kill -INT {pids}; kill -USR1 {pids}; kill -TERM {pids}"], check=True, timeout=10
    )
    time.sleep(0.2)
    return len(active_children()), sum(1 for _ in batches)


@pytest.mark.slow
def test_workers_survive_signals_to_the_session() -> None:
    assert run_ranks(_interrupted_epoch, 1, init=False) == [(2, 8)]


def _where_the_temporary_directory_has_a_long_path(folder: str) -> int:
    tempfile.tempdir = folder
    current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]  # inherited from pytest
    return len(epoch(train_loader(Noisy(), 8, num_workers=1, timeout_s=20)))


@pytest.mark.slow
def test_workers_work_if_tmpdir_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    assert run_ranks(_where_the_temporary_directory_has_a_long_path, 1, str(folder), init=False) == [3]
    assert list(folder.iterdir()) == []


class Stuck(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(3600)
        raise AssertionError


def _once_workers_live(count: int, action: Callable[[], object]) -> None:
    """Act in another thread, half a second after the given number of workers exist."""

    def wait() -> None:
        while len(active_children()) < count:
            time.sleep(0.01)
        time.sleep(0.5)
        action()

    threading.Thread(target=wait, daemon=True).start()


def _worker_message(report: Path, is_killed: bool) -> None:
    batches = train_loader(Stuck(), 8, num_workers=1, timeout_s=60 if is_killed else 1).epoch(0)
    if is_killed:
        _once_workers_live(1, lambda: os.kill(active_children()[0].pid, signal.SIGKILL))
    try:
        batches.take()
    except RuntimeError as error:
        report.write_text(str(error))
        for worker in active_children():
            worker.kill()
        os._exit(7)  # on the way out, DataLoader would wait for the worker, or report its death again


@pytest.mark.parametrize(
    ("is_killed", "words"),
    [
        (True, r"worker \(pid.*\) (is killed by signal|exited unexpectedly)"),
        pytest.param(False, "timed out after 1 seconds", marks=pytest.mark.slow),
    ],
    ids=["killed", "stuck"],
)
def test_dead_and_stuck_workers_are_reported(tmp_path: Path, is_killed: bool, words: str) -> None:
    with pytest.raises(RankFailure, match="exit code 7"):
        run_ranks(_worker_message, 1, tmp_path / "report", is_killed, init=False)
    assert re.search(words, (tmp_path / "report").read_text())


def _abandoned_workers(pids: Path) -> None:
    def die() -> None:
        pids.write_text(" ".join(str(worker.pid) for worker in active_children()))
        os.kill(os.getpid(), signal.SIGKILL)

    _once_workers_live(2, die)
    train_loader(Stuck(), 8, num_workers=2).epoch(0).take()


@pytest.mark.slow
def test_workers_end_if_the_main_process_is_killed_even_if_stuck(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(_abandoned_workers, 1, tmp_path / "pids", init=False)
    workers = [Path("/proc", pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 100
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(worker.exists() for worker in workers)


def test_samples_are_compared_by_value_in_any_memory_format() -> None:
    table = torch.arange(6).view(2, 3) * 1j
    for sample in (table[:, 1], table[:1, 1], table[0, 1:2].expand(4), table.conj()):
        assert checksum(sample) == checksum(sample.numpy(force=True).copy()) != checksum(-sample)
    assert checksum(np.array([[1], "a"], object)) == checksum(np.array([[1], "a"], object))
