"""Communication of hosts through the store: reports at times, and one verdict.

All of it is in a separate thread: a store whose host is gone or cut off may block a call for minutes. Any
process that reaches the store may write there: an invalid report or verdict is ignored, with one message.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.errors import UserError
from trainer.faults import exit_report
from trainer.faults.verdict import Observed, Verdict
from trainer.files.untrusted import Fields, printable, read_json

if TYPE_CHECKING:
    from torch.distributed import Store

_T = TypeVar("_T")

_EVERY_S, _EAGER_EVERY_S, _OTHERS_EVERY_S = 1.0, 0.2, 5.0
_ENDED_S = 5.0  # for the store to accept a host's last report
_HEARD_S = 2.0  # for the other hosts to read it
_VERDICT = "verdict"
_MAX_BYTES = 1 << 22
_FACTS = {"rank", "host", "phase", "where", "step", "silent_s"}


class Reports:
    """The reports of this host and of the others.

    Args:
        connect: opens a separate connection to the store, with the keys of this attempt.
        first: what is known of the ranks of other hosts before they have reported.
        num_ranks: of the run.

    Attributes:
        verdict: that of the run, once a host has given one.
        counts: the number of reports read, by host.
    """

    def __init__(
        self,
        connect: Callable[[], "Store"],
        host: int,
        first: Iterable[Observed],
        num_ranks: int = sys.maxsize,
    ) -> None:
        self.verdict: Verdict | None = None
        self._connect, self._host, self._num_ranks = connect, host, num_ranks
        self._known: dict[int, list[Observed]] = {}
        for rank in first:
            self._known.setdefault(rank.host, []).append(rank)
        self._hosts = sorted(self._known)
        self.counts = dict.fromkeys(self._hosts, 0)
        self._last_read = dict[int, str]()
        now = time.monotonic()
        self._heard_at = dict.fromkeys(self._hosts, now)
        self._answered_at = self._eager_since = now
        self._own: list[Observed] = []
        self._eager, self._asked = False, threading.Event()
        self._proposed: Verdict | None = None
        self._agreed = threading.Event()
        self._over, self._told = False, False
        self._last_report: list[Observed] = []
        self._awaited = list[str]()
        self._ended = set[int]()
        self._passed_over = set[str]()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def tell(self, own: Sequence[Observed], eager: bool) -> None:
        """Set this host's report; `eager`: something is wrong, so write and read at once and often."""
        self._own = list(own)
        if eager and not self._eager:
            self._eager, self._eager_since = True, time.monotonic()
            self._asked.set()
        self._eager = eager

    def rest(self) -> None:
        """Stop reporting: another rank reports for this host now, and this rank must not contradict it."""
        self._own, self._eager = [], False

    def others(self) -> list[Observed]:
        """The last reports of the other hosts' ranks, with their age."""
        now = time.monotonic()
        answer_age = now - self._answered_at
        observed = []
        for host in self._hosts:
            # Before, reports were read only at times: an old one then does not mean silence.
            heard_at = max(self._heard_at[host], self._eager_since)
            age = max(now - heard_at, answer_age if answer_age > 1.5 * _EVERY_S else 0.0)
            if all(rank.status == 0 for rank in self._known[host]):
                age = 0.0  # no further report will come
            observed += [dataclasses.replace(rank, heard_s=age) for rank in self._known[host]]
        return observed

    def agree(self, verdict: Verdict, timeout_s: float) -> Verdict | None:
        """The first verdict that a host gives, perhaps this one; None without an answer in time."""
        self._proposed = verdict
        self._asked.set()
        self._agreed.wait(timeout_s)
        return self.verdict

    def close(self, last_report: Sequence[Observed] = (), lost: Container[int] = ()) -> None:
        """Stop reporting; a `last_report` stays in the store, if the store accepts it in time.

        After a failure, the other hosts get a moment to read it, except those that are
        `lost`: the store may end with this process, and they would take this host for lost.
        """
        within_s = 2 * _EAGER_EVERY_S
        if last_report and all(rank.status == 0 for rank in last_report):
            self._last_report, within_s = list(last_report), _ENDED_S
        elif last_report and (others := [host for host in self._hosts if host not in lost]):
            self._last_report, within_s = list(last_report), _HEARD_S + within_s
            self._awaited = [f"told/{host}" for host in others]
        self._over = True
        self._asked.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        count, next_others, store = 0, 0.0, None
        while True:
            try:
                store = store or self._connect()
                if self._over:
                    self._send_last_report(store)
                    return
                count += 1
                if own := self._own:
                    # Another rank may have reported for this host before, with its own count.
                    store.set(f"report/{self._host}", _report(f"{os.getpid()}/{count}", own))
                self._exchange_verdicts(store)
                if self._eager or self.verdict is not None or time.monotonic() >= next_others:
                    self._read_others(store)
                    next_others = time.monotonic() + _OTHERS_EVERY_S
                self._tell_that_it_knows(store)
                self._answered_at = time.monotonic()
            except RuntimeError:  # DistStoreError and DistNetworkError of torch are such
                if self._over:
                    return
                store = None
            self._asked.wait(_EAGER_EVERY_S if self._eager else _EVERY_S)
            self._asked.clear()

    def _exchange_verdicts(self, store: "Store") -> None:
        if self._proposed is not None:
            text = json.dumps(dataclasses.asdict(self._proposed))
            self.verdict = self._read(_VERDICT, store.compare_set(_VERDICT, "", text), self._verdict_of)
            self._agreed.set()
        elif self.verdict is None and store.check([_VERDICT]):
            self.verdict = self._read(_VERDICT, store.get(_VERDICT), self._verdict_of)

    def _read_others(self, store: "Store") -> None:
        for host in self._hosts:
            if host in self._ended:
                continue
            if store.check([f"ended/{host}"]) and self._receive(host, f"ended/{host}", store):
                self._ended.add(host)
            elif store.check([f"report/{host}"]):
                self._receive(host, f"report/{host}", store)

    def _receive(self, host: int, key: str, store: "Store") -> bool:
        """Whether there is a report of the host under `key`; a new one is stored."""
        name, ranks = self._read(key, store.get(key), lambda report: self._report_of(host, report)) or (
            "",
            [],
        )
        if ranks and name != self._last_read.get(host):
            self._last_read[host] = name
            self.counts[host] += 1
            self._heard_at[host] = time.monotonic()
            self._known[host] = ranks
        return bool(ranks)

    def _read(self, key: str, text: bytes, take: Callable[[Fields], _T]) -> _T | None:
        """The result of `take` for the value of `key`; None if the value is invalid."""
        try:
            if len(text) > _MAX_BYTES:
                raise UserError(f"{key} has {len(text):,} bytes, but must have at most {_MAX_BYTES:,}")
            return take(Fields(key, read_json(Path(key), text)))
        except UserError as error:
            if key not in self._passed_over:
                self._passed_over.add(key)
                exit_report.print_line(f"[host {self._host}] no rank wrote {key} in the store: {error}")
            return None

    def _report_of(self, host: int, report: Fields) -> tuple[str, list[Observed]]:
        own = {rank.rank for rank in self._known[host]}
        ranks = [_observed(rank) for rank in report.sequence("ranks", dict)]
        if not ranks or not {rank.rank for rank in ranks} <= own or any(rank.host != host for rank in ranks):
            report.refuse("ranks", f"of ranks {sorted(own)}")
        return report.text("id"), ranks

    def _verdict_of(self, verdict: Fields) -> Verdict:
        ranks, status = verdict.sequence("ranks", int), verdict.count("status")
        if not ranks or not all(0 <= rank < self._num_ranks for rank in ranks):
            verdict.refuse("ranks", f"some below {self._num_ranks}")
        if not 0 < status < 256:
            verdict.refuse("status", "that of a run that ended badly, 1 to 255")
        facts = verdict.mapping("facts").values
        known = {name: value for name, value in facts.items() if name in _FACTS}
        saver = verdict.count("saver") if verdict.has("saver") else None
        return Verdict(tuple(ranks), verdict.text("kind"), status, verdict.text("message"), known, saver)

    def _tell_that_it_knows(self, store: "Store") -> None:
        """Tell hosts that wait for it that this host knows of their end; done by the host's leader."""
        bad_ends = (rank for host in self._ended for rank in self._known[host] if rank.status != 0)
        if self._own and not self._told and (self.verdict is not None or any(bad_ends)):
            store.set(f"told/{self._host}", "")
            self._told = True

    def _send_last_report(self, store: "Store") -> None:
        if self._last_report:
            store.set(f"ended/{self._host}", _report("last", self._last_report))
            store.set(f"told/{self._host}", "")
        deadline = time.monotonic() + _HEARD_S
        while self._awaited and not store.check(self._awaited) and time.monotonic() < deadline:
            time.sleep(0.05)


def _report(name: str, ranks: Sequence[Observed]) -> str:
    return json.dumps({"id": name, "ranks": [dataclasses.asdict(rank) for rank in ranks]})


def _observed(values: dict[str, Any]) -> Observed:
    """
    Raises:
        UserError: an unknown or missing field, or one of another type.
    """
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Observed)}
    for name, value in values.items():
        kind = kinds.get(name, ())
        if not isinstance(value, (kind, int) if isinstance(0.0, kind) else kind):
            raise UserError(f"a rank's {printable(name)} is {printable(repr(value))}, which it cannot be")
    try:
        return Observed(**values)
    except TypeError as error:
        raise UserError(f"a rank's report lacks something: {error}") from error
