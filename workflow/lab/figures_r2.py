"""Figures of R2: the ablation of the decode kernel step by step, and its cells against FP8 and the floor.

Pure functions from the analysis to SVG text, as in `lab.figures`, whose colours and axes they use.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from lab import bars_r2
from lab import figures as kit
from lab.decode_r2 import Decode, Step
from lab.product_cells import ProductCell
from lab.statistics import Estimate, geomean

FASTER, SLOWER = kit.FORMAT_COLOUR["mxfp4"], kit.FORMAT_COLOUR["fp8_e4m3"]
PREDICTED = "#cc79a7"
LABEL = 30  # characters of a step that fit beside its row
ROW_INCHES = 0.3

#: kernel -> (what it adds, predicted ratio of its time to that of the step before, or None).
Plan = Mapping[str, tuple[str, float | None]]


def fig_ablation(
    steps: Sequence[Step],
    plan: Plan,
    *,
    columns: int = 3,
    name: str = "",
    base: str = "stream floor",
    short: str = "the floor",
    title: str = "Figure 6: from a naive decode kernel to qgemv_mx, step by step",
) -> str:
    """The ablation as SVG text, one panel a point: each bar leads from the time of the step before to its own.

    Times are in multiples of the floor of the point; base, short: what stands for it, in the legend and on the axis.
    ValueError where there is no step, or no floor beside one.
    """
    panels: dict[tuple, list[Step]] = {}
    for step in steps:
        panels.setdefault(step.point, []).append(step)
    if not panels:
        raise ValueError("ablation: no step was measured")
    if lost := next((s for s in steps if s.floor is None), None):
        raise ValueError(f"ablation: no floor beside {lost.kernel} at {lost.point.shape}")
    most = max(len(own) for own in panels.values())
    name = name or f"fig6-ablation-c{columns}"
    with matplotlib.rc_context(kit.rc_of(name)):
        fig, axes = kit.new_canvas(columns, len(panels), ROW_INCHES * most + 1.0)
        for i, (ax, own) in enumerate(zip(axes, panels.values(), strict=True)):
            _ablation(ax, own, plan, short)
            if i % columns:
                ax.set_yticklabels([])
        kit.draw_legend(fig, _ablation_handles(steps, plan, base), columns)
        return kit.svg_of(fig, name, title)


def _ablation(ax: Axes, steps: Sequence[Step], plan: Plan, short: str) -> None:
    kit.house_axes(ax)
    ax.grid(False, axis="y")
    before: float | None = None
    marks: list[float] = []
    for y, step in enumerate(steps):
        floor = step.floor.value
        time = step.time.value / floor
        low, high = (end / floor for end in step.time.interval())
        if before is not None:
            colour = FASTER if time <= before else SLOWER
            ax.barh(y, time - before, left=before, height=0.6, color=colour, linewidth=0)
            ax.plot([before] * 2, [y - 1, y], color=kit.MUTED, linewidth=0.8, zorder=1.5)
            ratio = plan.get(step.kernel, ("", None))[1]
            if ratio is not None:
                marks.append(before * ratio)
                ax.plot(
                    marks[-1:], [y], marker="D", markersize=6, markerfacecolor="none",
                    markeredgecolor=PREDICTED, markeredgewidth=1.6, linestyle="none",
                )  # fmt: skip
            said = f"{100 * (time / before - 1):+.0f} %".replace("-", "−")
        else:
            said = ""
        if y in (0, len(steps) - 1):
            ax.plot([time], [y], marker="o", markersize=5, color=kit.INK, linestyle="none")
        ax.plot([low, high], [y, y], color=kit.INK, linewidth=1.5)
        ax.text(1.02, y, said, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
        before = time
    ax.axvline(1.0, color=kit.INK, linestyle=":", linewidth=1.1)
    ax.set_yticks(range(len(steps)), [label(s, plan) for s in steps])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(steps) - 0.4, -0.6)
    ends = [1.0, *(s.time.interval().high / s.floor.value for s in steps), *marks]
    margin = 0.06 * (max(ends) - min(ends))
    ax.set_xlim(min(ends) - margin, max(ends) + margin)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(kit.plain_number))
    ax.set_xlabel(f"time, multiples of {short}")
    point = steps[0].point
    ax.set_title(f"{point.shape}\nMXFP4, M={point.M}: {steps[-1].time.value:.3g} µs")


def label(step: Step, plan: Plan) -> str:
    """What a step adds, as far as it fits beside a row; its kernel id where nothing is known."""
    name = step.kernel.rpartition("/")[2]
    what = plan.get(step.kernel, ("", None))[0]
    return textwrap.shorten(what, LABEL, placeholder="…") if what else name


def _ablation_handles(steps: Sequence[Step], plan: Plan, base: str) -> list:
    handles: list = [Patch(facecolor=FASTER, label="the step is faster (change beside the panel)")]
    if any(s.over_previous is not None and s.over_previous.value > 1 for s in steps):
        handles.append(Patch(facecolor=SLOWER, label="the step is slower"))
    if any(plan.get(s.kernel, ("", None))[1] is not None for s in steps):
        mark = {"marker": "D", "markerfacecolor": "none", "markeredgecolor": PREDICTED}
        text = "predicted, from the step before"
        handles.append(Line2D([], [], linestyle="none", markeredgewidth=1.6, label=text, **mark))
    handles.append(Line2D([], [], color=kit.INK, linestyle=":", label=base))
    return handles


def fig_decode(cells: Sequence[Decode], *, columns: int = 3) -> str:
    """Speed over FP8, then time over the floor, against M: thin lines are shapes, the thick one their geometric mean.

    One panel a format; dashed lines are the bars. ValueError where no cell has a rival.
    """
    formats = list(dict.fromkeys(c.format for c in cells))
    panels = [("over_fp8", fmt) for fmt in formats] + [("over_floor", fmt) for fmt in formats]
    panels = [
        (what, fmt)
        for what, fmt in panels
        if any(c.format == fmt and getattr(c, what) is not None for c in cells)
    ]
    if not panels:
        raise ValueError("decode: no cell with a rival")
    name = f"fig7-decode-c{columns}"
    with matplotlib.rc_context(kit.rc_of(name)):
        fig, axes = kit.new_canvas(columns, len(panels), 2.75)
        for ax, (what, fmt) in zip(axes, panels, strict=True):
            _decode(ax, [c for c in cells if c.format == fmt], what, fmt)
        same_scale(axes, [what for what, _ in panels])
        kit.draw_legend(fig, _decode_handles(), columns)
        title = "Figure 7: qgemv_mx against cuBLASLt FP8 and against the floor"
        return kit.svg_of(fig, name, title)


def _decode(ax: Axes, cells: Sequence[Decode], what: str, fmt: str) -> None:
    kit.house_axes(ax)
    ms = shape_lines(ax, cells, attrgetter(what))
    for limit, dash in _limits(what, fmt):
        ax.axhline(limit, color=kit.INK, linestyle=dash, linewidth=1.1)
        ax.text(1.02, limit, f"{limit:g}", transform=ax.get_yaxis_transform(), va="center")
    ax.set_xscale("log", base=2)
    ax.set_xticks(ms, [str(m) for m in ms])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("M (tokens)")
    name = kit.FORMAT_NAME.get(fmt, fmt)
    ax.set_ylabel("speed over FP8 (ratio)" if what == "over_fp8" else "time over the floor (ratio)")
    ax.set_title(f"{name} over cuBLASLt FP8" if what == "over_fp8" else f"{name} over its floor")


def shape_lines(
    ax: Axes, cells: Sequence[ProductCell], value: Callable[[ProductCell], Estimate | None]
) -> list[int]:
    """Lines of a ratio against M: a thin one a shape, and their geometric mean; gives the M. cells: of one format."""
    known = [(c, ratio) for c in cells if (ratio := value(c)) is not None]
    colour = kit.FORMAT_COLOUR.get(known[0][0].format, kit.MUTED)
    by_shape: dict[str, list[tuple[ProductCell, Estimate]]] = {}
    for c, ratio in sorted(known, key=lambda pair: pair[0].point.M):
        by_shape.setdefault(c.point.shape, []).append((c, ratio))
    for own in by_shape.values():
        dash = "-" if own[0][0].weight_bytes >= bars_r2.LARGE_BYTES else "--"
        ax.plot(
            [c.point.M for c, _ in own], [ratio.value for _, ratio in own], color=colour,
            linewidth=0.9, linestyle=dash, alpha=0.6,
        )  # fmt: skip
    ms = sorted({c.point.M for c, _ in known})
    means = [geomean([ratio for c, ratio in known if c.point.M == m]).value for m in ms]
    ax.plot(ms, means, color=colour, linewidth=2.2, marker="D", markersize=4.5)
    return ms


def _limits(what: str, fmt: str) -> list[tuple[float, object]]:
    """Bars of a panel with their dashes."""
    if what == "over_floor":
        return [(bars_r2.FLOOR_LARGE, (0, (6, 2))), (bars_r2.FLOOR_SMALL, (0, (2, 2)))]
    if fmt not in bars_r2.OVER_FP8:
        return []
    mean, least = bars_r2.OVER_FP8[fmt]
    return [(mean, (0, (6, 2))), (least, (0, (2, 2)))]


def same_scale(axes: Sequence[Axes], kinds: Sequence[str], log: bool = False) -> None:
    """Panels of one kind share their scale, so that formats can be compared by eye."""
    for kind in dict.fromkeys(kinds):
        own = [ax for ax, k in zip(axes, kinds, strict=True) if k == kind]
        ends = [ax.get_ylim() for ax in own]
        low, high = min(e[0] for e in ends), max(e[1] for e in ends)
        for ax in own:
            ends = (low, high) if log else (math.floor(20 * low) / 20, math.ceil(20 * high) / 20)
            ax.set_ylim(*ends)


def line_handles() -> list[Line2D]:
    """What the lines of `shape_lines` are."""
    grey = {"color": kit.MUTED, "linewidth": 1.0}
    return [
        Line2D(
            [], [], color=kit.MUTED, linewidth=2.2, marker="D", label="geometric mean of the shapes"
        ),
        Line2D([], [], linestyle="-", label="a shape of 30 MB or more", **grey),
        Line2D([], [], linestyle="--", label="a smaller shape", **grey),
    ]


def _decode_handles() -> list[Line2D]:
    return [
        *line_handles(),
        Line2D(
            [], [], color=kit.INK, linestyle=(0, (6, 2)), label="bar: mean, or floor of large shapes"
        ),
        Line2D(
            [], [], color=kit.INK, linestyle=(0, (2, 2)), label="bar: any cell, or floor of small shapes"
        ),
    ]  # fmt: skip


__all__ = [
    "Plan", "fig_ablation", "fig_decode", "label", "line_handles", "same_scale", "shape_lines",
]  # fmt: skip
