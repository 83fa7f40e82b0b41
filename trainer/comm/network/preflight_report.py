"""The results of the preflight: each rank's report, and rank 0's verdict over all as a table."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch

from trainer.comm.network.checks import CHECKS
from trainer.comm.network.costs import Costs
from trainer.comm.network.join import JoinedRanks
from trainer.comm.network.link_speeds import LinkSpeed
from trainer.errors import first_line

_MAX_LINES = 12  # of one kind: a thousand hosts would hide what matters


@dataclass
class RankReport:
    """The report of one rank."""

    operations: dict[str, tuple[str, float]] = field(default_factory=dict)  # name: (fault or "", ms)
    in_sub_groups: dict[str, str] = field(default_factory=dict)  # name: fault or ""
    skipped: dict[str, str] = field(default_factory=dict)  # name: why
    links: list[LinkSpeed] = field(default_factory=list)  # those that start here
    costs: Costs | None = None  # the same on all ranks
    interface: str = ""  # as the kernel sees the open connections
    address: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)  # name: address of every one here
    named: dict[str, str] = field(default_factory=dict)  # variable: the interface in it
    backend: str = ""
    stopped_in: str = ""  # the operation that raised or did not return
    error: str = ""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: bytes) -> "RankReport":
        fields = json.loads(text)
        fields["links"] = [LinkSpeed(**link) for link in fields["links"]]
        fields["costs"] = Costs(**fields["costs"]) if fields["costs"] else None
        return RankReport(**fields)


@dataclass(frozen=True)
class PreflightReport:
    """All reports; None for a rank without one in time."""

    joined: JoinedRanks
    reports: list[RankReport | None]

    @property
    def passed(self) -> bool:
        return not self._faults()

    def _faults(self) -> list[str]:
        """One line for each fault, the silent ranks first: they make others fail."""
        names = [self.joined.name(rank) for rank in range(self.joined.world_size)]
        silent, wrong, stopped = [], [], []
        for name, report in zip(names, self.reports, strict=True):
            if report is None:
                silent.append(f"{name} is silent: it hangs, has died, or its network is gone")
                continue
            wrong += [f"{name}: {op}: {fault}" for op, (fault, _) in report.operations.items() if fault]
            wrong += [
                f"{name}: {op}, in a sub group: {fault}"
                for op, fault in report.in_sub_groups.items()
                if fault
            ]
            if report.error:
                operation = report.stopped_in or "the end"
                stopped.append(f"{name}: {operation} failed: {first_line(report.error)}")
        return silent + wrong + stopped

    def json(self) -> str:
        """All results, for `planner.comm` and other tools."""
        first = self.reports[0] or RankReport()
        results = {
            "passed": self.passed,
            "faults": self._faults(),
            "world_size": self.joined.world_size,
            "backend": first.backend,
            "torch": torch.__version__,
            "hosts": [
                {"ranks": ranks, "name": name, "interface": interface, "address": address}
                for ranks in self.joined.ranks_by_host
                for name, interface, address in [self._host(ranks)]
            ],
            "operations_ms": {name: ms for name, (_, ms) in first.operations.items()},
            "links": [asdict(link) for link in self._links()],
            "costs": asdict(first.costs) if first.costs else None,
        }
        return json.dumps(results, indent=1) + "\n"

    def _links(self) -> list[LinkSpeed]:
        links = [link for report in self.reports if report for link in report.links]
        return sorted(links, key=lambda link: (link.source != link.target, link.source, link.target))

    def _host(self, ranks: list[int]) -> tuple[str, str, str]:
        """Name, interface and address."""
        used = Counter((r.interface, r.address) for rank in ranks if (r := self.reports[rank]) and r.address)
        return self.joined.host_names[ranks[0]], *(used.most_common(1)[0][0] if used else ("-", "-"))

    def __str__(self) -> str:
        """The table for people."""
        joined = self.joined
        backend = next((report.backend for report in self.reports if report and report.backend), "no backend")
        lines = [
            f"preflight: {len(joined.ranks_by_host)} hosts, {joined.world_size} processes, {backend}, "
            f"torch {torch.__version__}, store at {joined.master or 'this process'}",
            "",
            f"{'host':<6}{'ranks':<12}{'interface':<12}{'address':<18}name",
        ]
        hosts = [
            f"{host:<6}{f'{ranks[0]}-{ranks[-1]}':<12}{interface:<12}{address:<18}{name}"
            for host, ranks in enumerate(joined.ranks_by_host)
            for name, interface, address in [self._host(ranks)]
        ]
        lines += [*_shortened(hosts), "", f"{'operation':<24}{'ms':>9}  {'result':<22}in sub groups"]
        lines += [*self._operations(), "reductions are sum, max, min and product"]
        if links := self._links():
            if len(links) > _MAX_LINES:  # show the slowest
                links.sort(key=lambda link: link.gbit_s)
            rows = [f"{_ends(link):<16}{link.latency_us:>12.0f}{link.gbit_s:>10.3g}" for link in links]
            lines += ["", f"{'link (hosts)':<16}{'latency us':>12}{'Gbit/s':>10}", *_shortened(rows)]
        if costs := next((report.costs for report in self.reports if report and report.costs), None):
            lines += ["", str(costs)]
        if faults := self._faults():
            lines += ["", "FAILED", *_shortened(faults), "", *self._advice()]
        else:
            lines += ["", "all passed"]
        return "\n".join(lines)

    def _operations(self) -> list[str]:
        """One line for each operation that some rank finished or skipped."""
        present = [report for report in self.reports if report]
        names = list(dict.fromkeys(name for r in present for name in (*r.operations, *r.skipped)))
        order = {name: number for number, name in enumerate(CHECKS)}  # others belong to a second backend
        names.sort(key=lambda name: order.get(name, len(order)))
        lines = []
        for name in names:
            done = [r.operations[name] for r in present if name in r.operations]
            faulty = [i for i, r in enumerate(self.reports) if r and r.operations.get(name, ("", 0))[0]]
            why = next((r.skipped[name] for r in present if name in r.skipped), "")
            result = f"FAIL on ranks {faulty}" if faulty else why or "pass"
            milliseconds = f"{max(ms for _, ms in done):9.2f}" if done else f"{'-':>9}"
            inside = [r.in_sub_groups[name] for r in present if name in r.in_sub_groups]
            in_groups = "-" if not inside else "FAIL" if any(inside) else "pass"
            lines.append(f"{name:<24}{milliseconds}  {result:<22}{in_groups}")
        return lines

    def _advice(self) -> list[str]:
        interfaces = next((report.interfaces for report in self.reports if report and report.interfaces), {})
        named = next((report.named for report in self.reports if report and report.named), {})
        now = ", ".join(f"{name}={value}" for name, value in named.items()) or "neither is set"
        have = ", ".join(f"{name} ({address})" for name, address in interfaces.items()) or "see `ip address`"
        return [
            "What to try:",
            "- Set the interface that all hosts share: GLOO_SOCKET_IFNAME=NAME for gloo, NCCL_SOCKET_IFNAME",
            f"  for NCCL ({now}); without it, gloo takes the address that the hostname resolves to.",
            f"  Interfaces: {have}.",
            "- Let the firewall pass all TCP ports between the hosts, not only the one of the rendezvous:",
            "  each process listens on a port chosen by the kernel.",
            "- Run it on one host, then on two at a time; for NCCL add NCCL_DEBUG=INFO.",
        ]


def _ends(link: LinkSpeed) -> str:
    return f"within {link.source}" if link.source == link.target else f"{link.source} -> {link.target}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"... and {more} more"]
