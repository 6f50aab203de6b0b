"""Tables of contenders: their rates over the same samples, what they store, and how ours stand to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.costs import spread
from benchmarks.peers import Contender
from benchmarks.samples import Samples
from benchmarks.tables import Column, PeerComparison, Table


def rate_table(
    title: str,
    rates: Mapping[str, Sequence[float]],
    stored: Mapping[str, float],
    samples: Samples,
    base: str,
    notes: Sequence[str] = (),
) -> Table:
    """Return a table of samples a second and stored bytes a sample, by contender, with ratios to the ``base``."""
    columns = (
        Column("contender"),
        Column("samples/s", ",.1f"),
        Column("lower quartile", ",.1f"),
        Column("upper quartile", ",.1f"),
        Column("GB/s of states"),
        Column("KB stored a sample", ",.0f"),
        Column("ratio"),
    )
    found = {name: spread(values) for name, values in rates.items()}
    rows = tuple(
        (
            name,
            one.median,
            one.low,
            one.high,
            one.median * samples.mean_bytes / 1e9,
            stored[name] / 1e3,
            one.median / found[base].median,
        )
        for name, one in found.items()
    )
    comparisons = tuple(
        PeerComparison(title, ours, peer, found[ours].median / found[peer].median)
        for peer in found
        if not peer.startswith("ours")
        for ours in found
        if ours.startswith("ours")
    )
    return Table(title, columns, rows, tuple(notes), comparisons)


def read_table(
    title: str,
    rates: Mapping[str, Sequence[float]],
    contenders: Sequence[Contender],
    samples: Samples,
    base: str,
    notes: Sequence[str] = (),
) -> Table:
    """Return the `rate_table` of reading."""
    count = len(samples.lengths)
    stored = {contender.name: contender.stored_bytes(range(count)) / count for contender in contenders}
    return rate_table(title, rates, stored, samples, base, notes)
