"""Exchange reports about ranks between hosts through the store, and agree on a failure.

A separate thread does this, because a call to a store on an unreachable host may block for minutes.
"""

import dataclasses
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence

from torch.distributed import Store

from trainer.failures.diagnosis import Failure, Observed

_EVERY_S, _EAGER_EVERY_S = 1.0, 0.2
_HEALTHY_EVERY_S = 10.0  # interval of reports while all is well
_PER_HOST_S = 0.005  # minimum interval of eager reports per host, because the store has a single thread
_ASKED_S = 5.0  # duration of eager reporting after another host has requested it
_ENDED_S = 5.0  # time for the store to accept a host's last report
_HEARD_S = 2.0  # time for the other hosts to read a failed end, because the store may end with this process
_FAILURE, _NEWS, _ENDS = "failure", "news", "ends"


class HostReports:
    """The exchange of reports between this host and the others.

    While all is well, a host reads one counter per second and rarely reports. A host increases the counter
    when it declares a failure, ends with a failure or suspects a rank. Then all hosts report often
    ("eagerly"), and hosts that suspect a rank read the reports of all other hosts in one call.

    Args:
        connect: opens a separate connection to this attempt's part of the store.
        first: observations of the ranks on other hosts, used until those hosts have reported.

    Attributes:
        failure: the failure of the run, once a host has declared one.
        counts: the number of reports read, by host.
        suspicion: a rank that seems to keep other ranks waiting, and its position; None if there is none.
        ended: the hosts whose last report has been read.
    """

    def __init__(self, connect: Callable[[], Store], host: int, first: Iterable[Observed]) -> None:
        self.failure: Failure | None = None
        self._connect, self._host = connect, host
        self._known: dict[int, list[Observed]] = {}
        for rank in first:
            self._known.setdefault(rank.host, []).append(rank)
        self._hosts = sorted(self._known)
        self.counts = dict.fromkeys(self._hosts, 0)
        self.suspicion: Hashable = None
        self._counts_before: dict[int, int] = {}  # `counts` when the suspicion arose
        self._last_read = dict[int, str]()
        self._present = set[int]()
        self._eager_s = max(_EAGER_EVERY_S, _PER_HOST_S * (len(self._hosts) + 1))
        self._news, self._ends, self._asked_until, self._asks_at = 0, 0, 0.0, 0.0
        self.resumed()
        self._own: list[Observed] = []
        self._eager, self._asked = False, threading.Event()
        self._proposed: Failure | None = None
        self._agreed = threading.Event()
        self._over = False
        self._last_report: list[Observed] = []
        self.ended = set[int]()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def _begin(self) -> None:
        if self._hosts and self._thread.ident is None:
            self.resumed()
            self._thread.start()

    def set_own(self, own: Sequence[Observed], eager: bool) -> None:
        """Set this host's report; if `eager`, because something is wrong, write and read reports often."""
        self._begin()
        self._own = list(own)
        if eager and not self._eager:
            self._eager, self._eager_since = True, time.monotonic()
            self._asked.set()
        self._eager = eager

    def resumed(self) -> None:
        """Restart all timers after a suspension, during which this host received no reports."""
        now = time.monotonic()
        self._heard_at = dict.fromkeys(self._hosts, now)
        self._answered_at = self._eager_since = now

    def stop(self) -> None:
        """Stop reporting, because another rank now reports for this host."""
        self._own, self._eager = [], False

    def others(self) -> list[Observed]:
        """Return the last observations of the ranks on other hosts, with the age of each observation."""
        now = time.monotonic()
        answer_age = now - self._answered_at
        observed = []
        for host in self._hosts:
            # Reports are read only while eager, so an older report does not mean silence.
            heard_at = max(self._heard_at[host], self._eager_since) + self._eager_s - _EAGER_EVERY_S
            age = max(now - heard_at, answer_age if answer_age > 1.5 * _EVERY_S + self._eager_s else 0.0)
            if all(rank.status == 0 for rank in self._known[host]):
                age = 0.0  # no further report will come
            observed += [dataclasses.replace(rank, heard_s=age) for rank in self._known[host]]
        return observed

    def confirmed(self, suspicion: Hashable, host: int) -> bool:
        """Return whether `host` sent two reports since the first call with `suspicion`; true for this host.

        An earlier or delayed report may show a rank's outdated progress, with which it seems to block others.
        """
        if suspicion != self.suspicion:
            self.suspicion, self._counts_before = suspicion, dict(self.counts)
        return host not in self.counts or self.counts[host] >= self._counts_before[host] + 2

    def agree(self, failure: Failure, timeout_s: float) -> Failure | None:
        """Return the failure that a host declared first, or `failure`; None if the store does not respond."""
        if not self._hosts:
            return failure
        self._begin()
        self._proposed = failure
        self._asked.set()
        self._agreed.wait(timeout_s)
        return self.failure

    def close(self, last_report: Sequence[Observed] = ()) -> None:
        """Stop the thread, after sending `last_report` if the store accepts it in time."""
        self._last_report, self._over = list(last_report), True
        is_bad = any(rank.status != 0 for rank in last_report)
        self._asked.set()
        if last_report:
            self._begin()
        if self._thread.ident is not None:
            self._thread.join(_HEARD_S + 2 * _EAGER_EVERY_S if is_bad else _ENDED_S if last_report else 1.0)

    def _run(self) -> None:
        count, next_report, store = 0, 0.0, None
        while True:
            try:
                store = store or self._connect()
                if self._over:
                    self._send_last_report(store)
                    return
                count += 1
                now = time.monotonic()
                if (own := self._own) and (self._eager or now < self._asked_until or now >= next_report):
                    # The pid distinguishes reports of different ranks on this host.
                    store.set(f"report/{self._host}", _report(f"{os.getpid()}/{count}", own))  # type: ignore[arg-type]  # its stub lacks bytes
                    next_report = now + _HEALTHY_EVERY_S
                self._exchange_failures(store)
                if self._eager or self.failure is not None:
                    self._read_others(store)
                self._answered_at = time.monotonic()
            except RuntimeError:  # includes torch's DistStoreError and DistNetworkError
                if self._over:
                    return
                store = None
            is_asked = self._eager or time.monotonic() < self._asked_until
            self._asked.wait(self._eager_s if is_asked else _EVERY_S)
            self._asked.clear()

    def _exchange_failures(self, store: Store) -> None:
        if self._proposed is not None:
            text = json.dumps(dataclasses.asdict(self._proposed))
            is_new = self.failure is None
            self.failure = _failure(store.compare_set(_FAILURE, "", text))
            self._agreed.set()
            if is_new:
                store.add(_NEWS, 1)
            return
        now = time.monotonic()
        asks = self._eager and now >= self._asks_at
        if asks:
            self._asks_at = now + _ASKED_S / 2
        if (news := store.add(_NEWS, int(asks))) != self._news:
            self._news, self._asked_until = news, now + _ASKED_S
            self._read_ends(store)
            if self.failure is None and store.check([_FAILURE]):
                self.failure = _failure(store.get(_FAILURE))

    def _read_ends(self, store: Store) -> None:
        if (ends := store.add(_ENDS, 0)) == self._ends:
            return
        for host in self._hosts:
            if host not in self.ended and store.check([f"ended/{host}"]):
                self._receive(host, store.get(f"ended/{host}"))
                self.ended.add(host)
        self._ends = ends

    def _read_others(self, store: Store) -> None:
        self._read_ends(store)
        for host in self._hosts:
            if host not in self._present and store.check([f"report/{host}"]):
                self._present.add(host)
        hosts = sorted(self._present - self.ended)
        keys = [f"report/{host}" for host in hosts]
        has_many = store.has_extended_api()  # type: ignore[attr-defined]  # its stub lacks it
        texts = store.multi_get(keys) if keys and has_many else map(store.get, keys)
        for host, text in zip(hosts, texts, strict=True):
            self._receive(host, text)

    def _receive(self, host: int, text: bytes) -> None:
        name, ranks = _opened(text)
        if name != self._last_read.get(host):
            self._last_read[host] = name
            self.counts[host] += 1
            self._heard_at[host] = time.monotonic()
            self._known[host] = ranks

    def _send_last_report(self, store: Store) -> None:
        if self._last_report:
            store.set(f"ended/{self._host}", _report("last", self._last_report))  # type: ignore[arg-type]  # its stub lacks bytes
            store.add(_ENDS, 1)
            if any(rank.status != 0 for rank in self._last_report):
                store.add(_NEWS, 1)
                time.sleep(_HEARD_S)


def _report(name: str, ranks: Sequence[Observed]) -> bytes:
    """Return a report, compressed because after a failure each host often reads all other hosts' reports."""
    return zlib.compress(json.dumps([name, [dataclasses.astuple(rank) for rank in ranks]]).encode())


def _opened(report: bytes) -> tuple[str, list[Observed]]:
    name, rows = json.loads(zlib.decompress(report))
    return name, [Observed(*row) for row in rows]


def _failure(text: bytes) -> Failure:
    values = json.loads(text)
    return Failure(**values | {name: tuple(values[name]) for name in ("ranks", "survivors")})
