"""Figures of R2b: the matrix kernel against FP8, BF16 and the kernels of others over M, and its ablation.

Pure functions from the analysis to SVG text, as in `lab.figures`, whose colours and axes they use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab import bars_r2b, figures_r2
from lab import figures as kit
from lab.gemm_r2b import HEADLINE, MS, bound_of
from lab.product_cells import ProductCell, Step
from lab.statistics import Estimate

#: What a panel shows: its title, the ratio of a cell, and its bars by M: (mean, any cell), None for none.
Limits = Mapping[int, tuple[float | None, float | None]]


def _peer(cell: ProductCell) -> Estimate | None:
    return cell.peers[cell.best_peer] if cell.best_peer else None


_FP8: Limits = {m: (limit, None) for m, limit in bars_r2b.OVER_FP8.items()}
_PEERS: Limits = dict.fromkeys(bars_r2b.OVER_BF16, (None, bars_r2b.PEERS))
PANELS: tuple[tuple[str, Callable[[ProductCell], Estimate | None], Limits], ...] = (
    ("cuBLASLt FP8", lambda cell: cell.over_fp8, _FP8),
    ("cuBLASLt BF16", lambda cell: cell.over_bf16, bars_r2b.OVER_BF16),
    ("the fastest peer", _peer, _PEERS),
)
FORMATS = ("mxfp4", "nvfp4")
MEAN_BAR, LEAST_BAR = "#cc79a7", kit.INK


def fig_speed(cells: Sequence[ProductCell], *, columns: int = 3) -> str:
    """Speed over each rival against M: thin lines are shapes, the thick one their geometric mean; marks are the bars.

    One row a format. ValueError where no cell has a rival.
    """
    own = [c for c in cells if c.point.M in MS]
    panels = [
        (fmt, *panel)
        for fmt in FORMATS
        for panel in PANELS
        if any(c.format == fmt and panel[1](c) is not None for c in own)
    ]
    if not panels:
        raise ValueError("matrix kernel: no cell with a rival")
    name = f"fig8-gemm-c{columns}"
    with matplotlib.rc_context(kit.rc_of(name)):
        fig, axes = kit.new_canvas(columns, len(panels), 2.75)
        for ax, (fmt, title, value, limits) in zip(axes, panels, strict=True):
            barred = fmt == HEADLINE or limits is _PEERS
            _speed(ax, [c for c in own if c.format == fmt], value, limits if barred else {})
            ax.set_title(f"{kit.FORMAT_NAME.get(fmt, fmt)} over {title}")
        figures_r2.same_scale(axes, [title for _, title, *_ in panels], log=True)
        for ax in axes:
            kit.ratio_ticks(ax)
        kit.draw_legend(fig, _handles(), columns)
        title = "Figure 8: qgemm_mx against cuBLASLt FP8, BF16 and the fastest kernel of others"
        return kit.svg_of(fig, name, title)


def _speed(ax: Axes, cells: Sequence[ProductCell], value: Callable, limits: Limits) -> None:
    kit.house_axes(ax)
    ms = figures_r2.shape_lines(ax, cells, value)
    ax.axhline(1.0, color=kit.INK, linestyle=":", linewidth=1.1)
    for m, (mean, least) in limits.items():
        if m not in ms:
            continue
        for limit, colour in ((mean, MEAN_BAR), (least, LEAST_BAR)):
            if limit is not None:
                ax.plot([m / 1.3, m * 1.3], [limit] * 2, color=colour, linewidth=2.6, zorder=4)
    ax.set_yscale("log")
    kit.m_axis(ax, ms)
    ax.set_ylabel("speed (ratio, log)")


def _handles() -> list[Line2D]:
    first = figures_r2.line_handles()
    return [
        *first,
        Line2D([], [], color=MEAN_BAR, linewidth=2.6, label="bar: geometric mean at this M"),
        Line2D([], [], color=LEAST_BAR, linewidth=2.6, label="bar: any cell at this M"),
        Line2D([], [], color=kit.INK, linestyle=":", label="as fast"),
    ]


def fig_ablation(
    steps: Sequence[Step],
    cells: Sequence[ProductCell],
    peak: Estimate | None,
    plan: figures_r2.Plan,
    *,
    columns: int = 3,
) -> str:
    """The ablation as SVG text, in multiples of the bound of each point; see `lab.figures_r2.fig_ablation`."""
    bounds = {c.point: bound_of(c, peak).time for c in cells if c.format == HEADLINE}
    held = [replace(s, floor=bounds.get(s.point)) for s in steps]
    return figures_r2.fig_ablation(
        held, plan, columns=columns, name=f"fig9-gemm-ablation-c{columns}", base="bound (reading or BF16 products)",
        short="the bound", title="Figure 9: from a plain matrix kernel to qgemm_mx, step by step",
    )  # fmt: skip


__all__ = ["fig_ablation", "fig_speed"]
