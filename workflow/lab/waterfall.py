"""Figure 3: from the floor, cause by cause and the residual, to the time of the testbed and of the production path.

A bar starts where the one above it ended, so the bars add up to the time; its whisker is the 95% interval of that one
amount. Times are in multiples of the floor for a summary over shapes, in microseconds for one cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lab import figures as kit
from lab.decomposition import BEYOND, RESIDUAL, Decomposition, Summary
from lab.r1_words import percent
from lab.statistics import Estimate

ROW_INCHES = 0.25
HATCH = "/////"

# kind -> colour, words of the legend. The residual has an edge as a second code, the stacked a hatch.
KINDS = {
    "term": ("#56b4e9", "measured term"),
    "factor": ("#0072b2", "factor (Shapley share)"),
    "residual": ("#d55e00", "residual: no cause found"),
    "beyond": ("#cc79a7", "not in the testbed"),
}
WORDS = {
    "launch": "launch",
    "grid_fill": "grid fill",
    "clock": "clock",
    "weight_load": "weight load",
    "layout_staging": "layout staging",
    "dequant_issue": "dequant issue",
    "matrix_issue": "matrix issue",
    "epilogue_reduction": "epilogue, reduction",
    RESIDUAL: "residual",
    BEYOND: "beyond testbed",
}
FLOOR_ROW, TESTBED_ROW, PRODUCTION_ROW = "stream floor", "testbed", "production path"


@dataclass(frozen=True)
class Step:
    """One row. kind "total" is a time in itself; any other is an amount that is added. share: of the gap, or None."""

    label: str
    kind: str
    amount: Estimate
    share: Estimate | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Waterfall:
    """One panel. unit: "x floor" or "µs"."""

    title: str
    unit: str
    steps: tuple[Step, ...]


def waterfall_of(found: Decomposition | Summary) -> Waterfall:
    """The panel of one cell (µs), or of a summary over shapes (multiples of the floor).

    A cause of a summary is marked stacked when it is so on at least half of the shapes.
    """
    fmt = kit.FORMAT_NAME
    if isinstance(found, Summary):
        unit, floor = "x floor", Estimate(1.0, 0.0, 1.0, log=False)
        count = f"{len(found.shapes)} {found.label} shape{'s' if len(found.shapes) > 1 else ''}"
        where = f"{fmt.get(found.format, found.format)}, M={found.M}, {count}"

        def step(bar) -> Step:
            # A part that saves time hides behind nothing.
            hidden = bar.stacked > 0 and 2 * bar.stacked >= len(found.shapes)
            stacked = hidden and bar.over_floor.value > 0
            return Step(_words(bar.name), bar.kind, bar.over_floor, bar.share, stacked)

    else:
        unit, floor, cell = "µs", found.floor, found.cell
        where = f"{cell.shape}, {fmt.get(cell.format, cell.format)}, M={cell.M}"

        def step(bar) -> Step:
            return Step(_words(bar.name), bar.kind, bar.amount, bar.share, bar.stacked)

    rows = [Step(FLOOR_ROW, "total", floor)]
    rows += [step(bar) for bar in (*found.causes, found.residual)]
    rows.append(Step(TESTBED_ROW, "total", found.full))
    if found.production is not None and found.beyond is not None:
        rows += [step(found.beyond), Step(PRODUCTION_ROW, "total", found.production)]
    verdicts = f"testbed: {found.verdict}"
    if rows[-1].label == PRODUCTION_ROW:
        verdicts += f"\nproduction path: {found.production_verdict}"
    return Waterfall(f"{where}\n{verdicts}", unit, tuple(rows))


def fig_waterfall(found: Sequence[Decomposition | Summary], *, columns: int = 3) -> str:
    """Figure 3 as SVG text, one panel for each summary or cell, in the order given.

    Raises ValueError when there is none, or when summaries and single cells are mixed: they have different units.
    """
    panels = [waterfall_of(one) for one in found]
    if not panels:
        raise ValueError("figure 3: no decomposed cell")
    if len({panel.unit for panel in panels}) > 1:
        raise ValueError("figure 3: summaries (x floor) and single cells (µs) in one figure")
    # The panels of one figure have the same rows, so that causes stand at one height.
    longest = max((panel.steps for panel in panels), key=len)
    order = [step.label for step in longest]
    order += [s.label for p in panels for s in p.steps if s.label not in order]
    rows = {label: i for i, label in enumerate(dict.fromkeys(order))}
    # Summaries of one M share an axis; another M has times of another size, whose causes would shrink to nothing.
    by_m = [getattr(one, "M", None) for one in found]
    slug = "-".join(f"{p.title.split(chr(10))[0]}" for p in panels)
    name = f"fig3-{slug}-c{columns}"
    with matplotlib.rc_context({**kit.rc_of(name), "hatch.linewidth": 1.3}):
        fig, axes = kit.new_canvas(columns, len(panels), ROW_INCHES * len(rows) + 1.0)
        for i, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
            same = [p for p, m in zip(panels, by_m, strict=True) if m is not None and m == by_m[i]]
            _draw(ax, panel, rows, _limits(same or [panel]))
            if i % columns:
                ax.set_yticklabels([])
        kit.draw_legend(fig, _handles(panels), columns)
        title = "Figure 3: from the floor to the time of the production path, cause by cause"
        return kit.svg_of(fig, name, title)


def _words(name: str) -> str:
    return WORDS.get(name, name)


def _spans(panel: Waterfall) -> list[tuple[float, float, float, float]]:
    """Start, end, and ends of the whisker of each row; a total starts where it ends."""
    spans, at = [], 0.0
    for step in panel.steps:
        low, high = step.amount.interval()
        if step.kind == "total":
            at = step.amount.value
            spans.append((at, at, low, high))
        else:
            spans.append((at, at + step.amount.value, at + low, at + high))
            at += step.amount.value
    return spans


def _limits(panels: Sequence[Waterfall]) -> tuple[float, float]:
    """Axis that shows the gap: it does not start at 0, and totals are marks, not bars."""
    points = [point for panel in panels for span in _spans(panel) for point in span]
    low, high = min(points), max(points)
    margin = 0.06 * (high - low) or 0.1 * high
    return low - margin, high + margin


def _draw(ax: Axes, panel: Waterfall, rows: dict[str, int], limits: tuple[float, float]) -> None:
    kit.house_axes(ax)
    ax.grid(False, axis="y")
    previous: tuple[int, float] | None = None
    for step, (start, end, low, high) in zip(panel.steps, _spans(panel), strict=True):
        y = rows[step.label]
        if previous is not None:
            ends = [previous[0], y]
            ax.plot([previous[1]] * 2, ends, color=kit.MUTED, linewidth=0.8, zorder=1.5)
        if step.kind == "total":
            ax.plot([end], [y], color=kit.INK, marker="D", markersize=5.5, linestyle="none")
            text = f"{end:.2f}x" if panel.unit == "x floor" else f"{end:.2f} {panel.unit}"
        else:
            ax.barh(y, end - start, left=start, height=0.62, **_bar_style(step))
            text = "–" if step.share is None else percent(step.share.value)
        ax.plot([low, high], [y, y], color=kit.INK, linewidth=1.5)
        for whisker in (low, high):
            ax.plot([whisker] * 2, [y - 0.14, y + 0.14], color=kit.INK, linewidth=1.1)
        bold = "bold" if step.kind in ("total", "residual") else "normal"
        ax.text(
            1.02,
            y,
            text,
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            fontweight=bold,
        )
        previous = (y, end)
    ax.text(1.02, 1.0, "of gap", transform=ax.transAxes, va="bottom", fontsize=8.5)
    ax.axvline(panel.steps[0].amount.value, color=kit.INK, linestyle=":", linewidth=1.1)
    ax.set_yticks(list(rows.values()), list(rows))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(*limits)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(kit.plain_number))
    ax.set_xlabel(
        "time, multiples of the floor" if panel.unit == "x floor" else "time per call (µs)"
    )
    ax.set_title(panel.title)


def _bar_style(step: Step) -> dict:
    colour = KINDS[step.kind][0]
    style = {"facecolor": colour, "edgecolor": "none", "linewidth": 0}
    if step.stacked:
        # Lines of the paper's colour: they read on the bar on light and on dark paper.
        style |= {"edgecolor": kit.PAPER, "hatch": HATCH}
    elif step.kind == "residual":
        style |= {"edgecolor": kit.INK, "linewidth": 1.2}
    return style


def _handles(panels: Sequence[Waterfall]) -> list[Patch]:
    steps = [step for panel in panels for step in panel.steps]
    present = {step.kind for step in steps}
    handles = [
        Patch(**_bar_style(Step("", kind, steps[0].amount)), label=words)
        for kind, (_, words) in KINDS.items()
        if kind in present
    ]
    if any(step.stacked for step in steps):
        hatched = Step("", "factor", steps[0].amount, stacked=True)
        text = "stacked: hidden behind another factor"
        handles.append(Patch(**_bar_style(hatched), label=text))
    return handles
