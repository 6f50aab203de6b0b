"""The plots of the chunk-size benchmark. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.measure import ACCESSES, Setting
from benchmarks.sweep import LIMITED_ACCESSES, Measured, ReadCase, RunOff
from dspark_store.format.codecs import CODEC_PRESETS

mpl.use("Agg")
plt.style.use("dspark_store.plot")

# of the style's colours, and a shape for each as well
_COLOURS = {"none": "C6", "fast": "C1", "default": "C0", "dense": "C2"}
_SHAPES = {"none": "s", "fast": "^", "default": "o", "dense": "D"}


def heat_maps(out: Path, measured: Mapping[Setting, Measured], accesses: Sequence[str]) -> list[str]:
    """Draw T against R for every codec: a figure of read rates by access, and one of writing and size.

    Return the names of the files in ``out``.
    """
    single = {setting: one for setting, one in measured.items() if setting.layers == 1}
    reading: dict[str, Callable[[Measured], float]] = {
        access: lambda one, access=access: one.reading[ReadCase(access)].median / 1e6  # type: ignore[misc]
        for access in accesses
    }
    written: dict[str, Callable[[Measured], float]] = {
        "write, MB/s": lambda one: one.writing.median / 1e6,
        "stored, of ragged bf16\nrows of K+1 vectors": lambda one: one.facts.stored,
        "bytes read per byte wanted,\nspan": lambda one: one.facts.amplification["span"],
        "bytes read per byte wanted,\nscattered": lambda one: one.facts.amplification["scattered"],
    }
    title = "Read rate from the page cache, MB of valid states per second"
    names = [_heat_map(out / "chunk_sizes_read.png", title, single, reading)]
    return [*names, _heat_map(out / "chunk_sizes_size.png", "Writing and size", single, written)]


def _heat_map(
    path: Path, title: str, measured: Mapping[Setting, Measured], values: Mapping[str, Callable[[Measured], float]]
) -> str:
    codecs = [codec for codec in CODEC_PRESETS if any(setting.codec == codec for setting in measured)]
    tokens = sorted({setting.chunk_tokens for setting in measured})
    rows = sorted({setting.shard_size for setting in measured})
    size = (2.2 + len(codecs) * (0.7 + 0.75 * len(rows)), 0.9 + len(values) * (0.75 + 0.36 * len(tokens)))
    figure, grid = plt.subplots(len(values), len(codecs), figsize=size, squeeze=False, layout="constrained")
    for name, axes_row in zip(values, grid, strict=True):
        tables = [
            np.array([[values[name](measured[Setting(codec, t, r)]) for r in rows] for t in tokens]) for codec in codecs
        ]
        low, high = min(table.min() for table in tables), max(table.max() for table in tables)
        for codec, axes, table in zip(codecs, axes_row, tables, strict=True):
            axes.grid(visible=False)
            axes.imshow(table, cmap="cividis", norm=LogNorm(low, high), aspect="auto")
            _write_values(axes, table, math.sqrt(low * high))
            axes.set_xticks(range(len(rows)), rows)
            axes.set_yticks(range(len(tokens)), tokens)
            axes.tick_params(length=0, labelsize=8)
            if axes in grid[0]:
                axes.set_title(codec, fontsize=11)
            if axes in grid[-1]:
                axes.set_xlabel("samples per shard, R", fontsize=9)
        axes_row[0].set_ylabel(f"{name}\n\ntokens per chunk, T", fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
    plt.close(figure)
    return path.name


def _write_values(axes: Axes, table: np.ndarray, middle: float) -> None:
    for (row, column), value in np.ndenumerate(table):
        text = f"{value:,.0f}" if value >= 20 else f"{value:.2f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if value < middle else "black")


def size_against_speed(
    out: Path, measured: Mapping[Setting, Measured], run_offs: Sequence[RunOff], default: Setting
) -> str:
    """Draw stored size against read rate, a panel a way to read, with the Pareto front; return the file's name."""
    cases = sorted(
        {case for one in measured.values() for case in one.reading if case.access in LIMITED_ACCESSES},
        key=lambda case: (list(ACCESSES).index(case.access), case.storage_rate),
    )
    columns = max(1, len({case.storage_rate for case in cases}))
    rows = -(-len(cases) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.9 * rows + 0.7), squeeze=False, layout="constrained", sharex=True
    )
    recommended = {one.case: one.recommended for one in run_offs}
    for case, axes in zip(cases, grid.flat, strict=False):
        settings = [setting for setting, one in measured.items() if case in one.reading]
        _draw_case(axes, case, {setting: measured[setting] for setting in settings})
        for setting, shape, name in (
            (recommended.get(case), "*", "the recommended setting"),
            (default, "P", "the default setting"),
        ):
            if setting is not None and setting in measured:
                x, y = measured[setting].facts.stored, measured[setting].reading[case].median / 1e6
                ring = {"facecolor": "none", "edgecolor": "C3", "linewidth": 1.6}
                axes.scatter(x, y, marker=shape, s=190, label=name, **ring)
    for axes in grid[-1]:
        axes.set_xlabel("stored, of ragged bf16 rows of K+1 vectors")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.2, 1.5, 2, 3, 4, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    for axes in grid[:, 0]:
        axes.set_ylabel("read rate, MB of valid states per second")
    handles, labels = grid.flat[len(cases) - 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=-(-len(labels) // 3), frameon=False, fontsize=9)
    path = out / "chunk_sizes_pareto.png"
    figure.savefig(path)
    plt.close(figure)
    return path.name


def _draw_case(axes: Any, case: ReadCase, measured: Mapping[Setting, Measured]) -> None:  # noqa: ANN401 - scatter takes no dict
    """Draw the settings of one way to read, and their Pareto front, named where it turns."""
    for codec in CODEC_PRESETS:
        for several, filled in ((False, True), (True, False)):
            chosen = [s for s in measured if s.codec == codec and (s.layers > 1) is several]
            if chosen:
                x = [measured[s].facts.stored for s in chosen]
                y = [measured[s].reading[case].median / 1e6 for s in chosen]
                name = f"codec {codec}" + (", all layers in a chunk" if several else "")
                colour = {"facecolor": _COLOURS[codec] if filled else "none", "edgecolor": _COLOURS[codec]}
                axes.scatter(x, y, marker=_SHAPES[codec], s=26, alpha=0.8, linewidth=0.9, label=name, **colour)
    able = [setting for setting in measured if setting.layers == 1]
    sizes = [measured[setting].facts.stored for setting in able]
    speeds = [measured[setting].reading[case].median / 1e6 for setting in able]
    front = pareto_front(sizes, speeds)
    axes.plot(
        [sizes[at] for at in front],
        [speeds[at] for at in front],
        drawstyle="steps-post",
        color="C4",
        linewidth=1.4,
        zorder=0,
        label="Pareto front",
    )
    axes.set_ylim(bottom=0, top=1.12 * max(speeds))
    rate = "page cache" if case.storage_rate == float("inf") else f"storage of {case.storage_rate / 1e6:.0f} MB/s"
    axes.set_title(f"{case.access}, {rate}", fontsize=10)


def pareto_front(sizes: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Return the indices of the choices that no other is both as small and as fast as, and better in one; by size.

    Of equal choices the first is kept.
    """
    front: list[int] = []
    fastest = float("-inf")
    for at in sorted(range(len(sizes)), key=lambda at: (sizes[at], -speeds[at], at)):
        if speeds[at] > fastest:
            front.append(at)
            fastest = speeds[at]
    return front
