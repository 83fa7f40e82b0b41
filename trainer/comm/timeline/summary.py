"""A timeline for people: one backward pass as a plot, a run as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.comm.timeline.records import BucketSum, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"queued": "#d0d4da", "hidden": "#4c78a8", "exposed": "#e45756"}


def draw(timeline: Timeline) -> Figure:
    """The last backward pass of this rank, a row per bucket, milliseconds.

    Grey: ready and queued; blue: moving during computation; red: moving without computation. A mark shows
    when the last rank had the bucket ready, at the last call of `Timeline.metrics`.
    """
    from matplotlib.figure import Figure  # costs half a second, and only rank 0 draws

    records = timeline.last_pass
    figure = Figure(figsize=(9, 1.6 + 0.3 * len(records)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("ms since the first bucket was ready")
    axes.set_title(f"gradient all-reduce, rank {timeline.rank}, backward pass {timeline.num_passes}")
    axes.set_yticks(range(len(records)), [record.label for record in records])
    axes.invert_yaxis()
    if not records:
        return figure
    origin, last_ready = records[0].ready, max(record.ready for record in records)

    def bars(name: str, begin: list[float], end: list[float]) -> None:
        left = [1e3 * (b - origin) for b in begin]
        widths = [1e3 * max(0.0, e - b) for b, e in zip(begin, end, strict=True)]
        axes.barh(range(len(records)), widths, left=left, color=_COLOURS[name], label=name)

    starts, ends = [r.start for r in records], [r.end for r in records]
    split = [min(record.end, max(record.start, last_ready)) for record in records]
    bars("queued", [r.ready for r in records], starts)
    bars("hidden", starts, split)
    bars("exposed", split, ends)
    arrivals = timeline.arrivals
    if arrivals is not None and arrivals.ready.shape[1] == len(records):
        lateness = arrivals.ready.amax(0) - arrivals.ready[timeline.ranks.index(timeline.rank)]
        last = [1e3 * (r.ready - origin + float(late)) for r, late in zip(records, lateness, strict=True)]
        label = f"ready on the last rank (rank {arrivals.last_rank}, {1e3 * arrivals.skew_s:.3g} ms late)"
        axes.scatter(last, range(len(records)), marker="|", s=120, color="black", zorder=3, label=label)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def table(timeline: Timeline) -> str:
    """The whole run on this rank: means per pass by bucket, and in total; "" before the first pass.

    A bucket whose size changed, as after DDP rebuilt its buckets, is another row.
    """
    timeline.sum_up(wait=True)
    passes = timeline.passes
    if passes.count == 0:
        return ""
    lines = [f"bucket {'MiB':>8} {'moves':>7} {'queued ms':>10} {'moving ms':>10} {'MB/s':>8}  waited for"]
    for (index, _), sums in sorted(timeline.buckets.items()):
        moved_s, num_bytes = sums.moved_s / sums.count, sums.num_bytes / sums.count
        queued_ms, moved_ms = 1e3 * sums.queued_s / sums.count, 1e3 * moved_s
        lines.append(
            f"{index:>6} {num_bytes / 2**20:8.3f} {sums.count:7} {queued_ms:10.2f} {moved_ms:10.2f} "
            f"{num_bytes / 1e6 / max(moved_s, 1e-9):8.0f}  {_most_waited(sums)}"
        )
    total, hidden, exposed = (
        1e3 * seconds / passes.count for seconds in (passes.total_s, passes.hidden_s, passes.exposed_s)
    )
    lines.append(
        f"communication in a backward pass: {total:.2f} ms, {hidden:.2f} hidden and {exposed:.2f} exposed"
    )
    if timeline.times_last:
        rank = max(timeline.times_last, key=timeline.times_last.__getitem__)
        looks = sum(timeline.times_last.values())
        lines.append(f"last to be ready: rank {rank}, {timeline.times_last[rank]} of {looks} times measured")
    return "\n".join(lines)


def _most_waited(sums: BucketSum) -> str:
    if not sums.waited_s:
        return "-"
    rank = max(sums.waited_s, key=sums.waited_s.__getitem__)
    return f"rank {rank}, {1e3 * sums.waited_s[rank] / sums.count:.2f} ms"
