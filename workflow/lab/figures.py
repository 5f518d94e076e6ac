"""Figures of the report: pure functions from tables to SVG text.

Every function takes `columns`, the number of small multiples beside each other: 3 reads on a desktop, 1 at 360 px.
The text of an SVG is a function of its inputs alone (fixed hash salt, no date), so a replay reproduces it byte by byte.
A cell is drawn only if its correctness is "passed"; a time on a `correctness_only` cell is refused with an error.
"""

from __future__ import annotations

import gc
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from xml.sax.saxutils import escape

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

HEADLINE_REGIME = "cold_graph"
ROW_GAP = 0.24  # inches between the panels of one row and the next

# The page replaces these three by its own ink, grid and paper, so they must not be used for data.
INK, GRID, PAPER = "#1b1f24", "#d5d9df", "#ffffff"
MUTED = "#7a828c"

# Okabe-Ito; bf16 takes the ink so that it stays visible on dark paper. Yellow is left out: it fades on white.
FORMAT_COLOUR = {
    "bf16": INK,
    "fp8_e4m3": "#d55e00",
    "mxfp4": "#0072b2",
    "nvfp4": "#009e73",
    "int4_g128": "#cc79a7",
    "int4_g64": "#e69f00",
}
FORMAT_NAME = {
    "bf16": "BF16",
    "fp8_e4m3": "FP8",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "int4_g128": "INT4-g128",
    "int4_g64": "INT4-g64",
}
# marker, line style: the second code beside colour, so that no line is told apart by colour alone.
KERNEL_STYLE = {
    "cublaslt_bf16": ("o", "-"),
    "cublaslt_fp8": ("s", "-"),
    "naive_dequant": ("x", "--"),
    "qgemv_mx": ("D", "-"),
    "qgemm_mx": ("^", "-"),
    "linear": ("v", "-"),
    "testbed/full": ("<", "--"),
    "peer/humming_bf16": ("P", "-"),
    "peer/humming_fp8": ("X", "-"),
    "peer/humming_fp8_quantised": ("*", "--"),
    "peer/marlin_fp4": ("h", "-"),
}
OTHER_STYLE = ("P", "-.")
#: Kernels whose lines are thick beside those of all others.
OURS = ("qgemv_mx", "qgemm_mx")

UNIT_NAME = {
    "us": "time (µs)",
    "M": "M (tokens)",
    "ratio": "ratio (no unit)",
    "fraction": "fraction (no unit)",
}
# The verdicts that a point or share claim gets from statistics.
VERDICT_MARK = {"HIT": "o", "STRADDLE": "D", "MISS": "X"}

# Names in a campaign's constants (lab.constants).
BANDWIDTH = "read_bandwidth_tbps"
CEILINGS = {"bf16_peak_tflops": "BF16", "fp8_peak_tflops": "FP8"}

CELL_KEY = ["kernel", "format", "shape", "N", "K", "M", "regime"]


# ---- what may be drawn -------------------------------------------------------------------------------------------


def refuse_timed_reference(cells: pd.DataFrame) -> None:
    """Raise ValueError if a cell whose role is `correctness_only` carries a time: it can never be a result."""
    if cells.empty:
        return
    bad = cells[(cells["role"] == "correctness_only") & cells["time_us"].notna()]
    if len(bad):
        row = bad.iloc[0]
        raise ValueError(
            f"cell ({row['kernel']}, {row['format']}, {row['shape']}, M={row['M']}, {row['regime']}) has role "
            f"correctness_only and carries time_us={row['time_us']:g}: a reference kernel has no time"
        )


def timed(cells: pd.DataFrame, regime: str | None = None) -> pd.DataFrame:
    """Cells that may be shown as a time: correctness "passed" and time_us present, in `regime` if given.

    Raises ValueError on a timed `correctness_only` cell and on a cell that occurs twice.
    """
    refuse_timed_reference(cells)
    if cells.empty:
        return cells
    keep = cells[(cells["correctness"] == "passed") & cells["time_us"].notna()]
    if regime is not None:
        keep = keep[keep["regime"] == regime]
    twice = keep[keep.duplicated(CELL_KEY)]
    if len(twice):
        row = twice.iloc[0]
        raise ValueError(
            f"cell ({row['kernel']}, {row['format']}, {row['shape']}, M={row['M']}, {row['regime']}) occurs twice: "
            "pass the cells of one campaign (see newest_cells)"
        )
    return keep


def newest_cells(cells: pd.DataFrame, campaigns: Sequence[Mapping]) -> pd.DataFrame:
    """Cells of the device measured last; where two of its campaigns hold one cell, the newer campaign's row.

    A row with a floor beside it goes before one without: R1 times the baselines again, not the floors of their bytes.
    """
    if cells.empty or not campaigns:
        return cells
    ordered = sorted(campaigns, key=lambda c: (c["created_utc"], c["id"]))
    rank = {c["id"]: i for i, c in enumerate(ordered)}
    device = ordered[-1]["device"]["name"]
    ours = cells[cells["campaign"].isin(list(rank)) & (cells["device"] == device)]
    ours = ours.assign(_rank=ours["campaign"].map(rank), _floor=ours["floor_us"].notna())
    ours = ours.sort_values(["_floor", "_rank"], kind="stable").drop_duplicates(
        CELL_KEY, keep="last"
    )
    return (
        ours.sort_values("_rank", kind="stable")
        .drop(columns=["_rank", "_floor"])
        .reset_index(drop=True)
    )


def of_the_set(cells: pd.DataFrame, shapes: Sequence[Mapping]) -> pd.DataFrame:
    """Cells on the shapes of prereg/shapes.json, without experiments, variants, and other plans of our own kernels."""
    if cells.empty:
        return cells
    known = cells["shape"].isin([s["name"] for s in shapes])
    tried = cells["kernel"].str.startswith(("cause/", "testbed/-", "qgemv_mx/", "qgemm_mx/"))
    return cells[known & ~tried].reset_index(drop=True)


def drawn_once(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells without what a call of `linear` launches, where the kernels are there that it launches."""
    if cells.empty or not cells["kernel"].isin(OURS).any():
        return cells
    return cells[cells["kernel"] != "linear"].reset_index(drop=True)


def floors(cells: pd.DataFrame, regime: str) -> pd.DataFrame:
    """Size-matched stream floor in microseconds, columns shape, format, M, floor_us, sorted."""
    rows = cells[(cells["regime"] == regime) & (cells["role"] != "correctness_only")]
    beside = rows[rows["floor_us"].notna()][["shape", "format", "M", "floor_us"]]
    own = timed(cells, regime)
    own = own[own["role"] == "floor"][["shape", "format", "M", "time_us"]]
    both = pd.concat([beside, own.rename(columns={"time_us": "floor_us"})])
    return both.drop_duplicates(["shape", "format", "M"]).sort_values(["shape", "format", "M"])


# ---- drawing kit -------------------------------------------------------------------------------------------------


def new_canvas(columns: int, panels: int, panel_height: float) -> tuple[Figure, list[Axes]]:
    """Figure of `panels` axes in `columns` columns. Wide figures are 10.4 in, single-column ones 3.7 in."""
    if columns < 1:
        raise ValueError(f"columns={columns} is not at least 1")
    rows = math.ceil(panels / columns)
    width = 3.7 if columns == 1 else 3.47 * columns
    fig = Figure(figsize=(width, rows * panel_height + 0.9), layout="constrained", facecolor=PAPER)
    # A title must stand nearer to its own panel than to the axis label above it.
    fig.get_layout_engine().set(h_pad=ROW_GAP / 2)
    FigureCanvasSVG(fig)
    grid = fig.subplots(rows, columns, squeeze=False)
    axes = [ax for line in grid for ax in line]
    for spare in axes[panels:]:
        spare.set_visible(False)
    return fig, axes[:panels]


def house_axes(ax: Axes) -> None:
    """The house look of axes: light grid behind the data, no frame on the far sides."""
    ax.set_facecolor("none")
    ax.grid(True, which="major", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def plain_number(value: float, _pos: int | None = None) -> str:
    """A tick in plain digits: 300, 10k."""
    value = float(f"{value:.4g}")  # 1.2 times a power of ten is not exact
    if value >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def m_axis(ax: Axes, ms: Iterable[int]) -> None:
    """Axis of M that spans all of `ms`, so that panels with fewer M can be compared by eye."""
    low, top = min(ms), max(ms)
    ticks = [m for m in (1, 4, 16, 64, 256, 1024, 4096, 16384) if m <= top] or [top]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(low / 1.5, top * 1.5)
    ax.set_xlabel("M (tokens)")


def ratio_ticks(ax: Axes) -> None:
    """Ticks of a logarithmic axis of ratios: 0.5, 1, 2 and what lies between, as many as it takes."""
    low, high = ax.get_ylim()
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [s * 10.0**d for d in range(-3, 4) for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) <= 7:
            break
    ax.set_yticks(ticks, [plain_number(t) for t in ticks])
    ax.yaxis.set_minor_locator(NullLocator())


def _style(kernel: str) -> tuple[str, str]:
    return KERNEL_STYLE.get(kernel, OTHER_STYLE)


def _width(kernel: str, kernels: Iterable[str]) -> dict[str, float]:
    """Width and order of a kernel's line: ours are thick and on top, once they are there."""
    if kernel in OURS:
        return {"linewidth": 2.0, "zorder": 3.0}
    return {"linewidth": 0.9 if set(OURS) & set(kernels) else 1.4, "zorder": 2.0}


def _colour(fmt: str) -> str:
    return FORMAT_COLOUR.get(fmt, MUTED)


def _label(kernel: str, fmt: str) -> str:
    return f"{kernel}, {FORMAT_NAME.get(fmt, fmt)}"


def _series(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(kernel, format) pairs in a fixed order: known kernels and formats first."""
    pairs = set(zip(rows["kernel"], rows["format"], strict=True))
    kernels, formats = list(KERNEL_STYLE), list(FORMAT_COLOUR)

    def place(name: str, known: list[str]) -> tuple[int, str]:
        return (known.index(name) if name in known else len(known), name)

    return sorted(pairs, key=lambda p: (place(p[0], kernels), place(p[1], formats)))


def _handle(kernel: str, fmt: str) -> Line2D:
    marker, line = _style(kernel)
    return Line2D(
        [],
        [],
        color=_colour(fmt),
        marker=marker,
        linestyle=line,
        markersize=4.5,
        label=_label(kernel, fmt),
    )


def draw_legend(fig: Figure, handles: list[Line2D], columns: int) -> None:
    """One legend under all panels (above them on a narrow page)."""
    # One column is many screens long: there the legend stands first.
    fig.legend(
        handles=handles,
        loc="outside upper center" if columns == 1 else "outside lower center",
        ncols=1 if columns == 1 else min(4, len(handles)),
        frameon=False,
        handlelength=3.2,
    )


def rc_of(name: str) -> dict:
    """matplotlib settings under which the figure `name` has reproducible bytes."""
    return {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.labelsize": 9,
        "legend.fontsize": 8.5,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.titlecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "lines.linewidth": 1.4,
        "mathtext.default": "regular",
    }


def svg_of(fig: Figure, name: str, title: str) -> str:
    """SVG text: no prolog, no metadata, ids prefixed by `name` so that many can share one page."""
    buffer = io.StringIO()
    # `savefig` draws all of a figure once more, to no file, only to lay it out.
    fig.get_layout_engine().execute(fig)
    fig.set_layout_engine("none")
    fig.canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.S)
    slug = re.sub(r"[^A-Za-z0-9]+", "_", name)
    text = re.sub(r'\bid="', f'id="{slug}-', text)
    text = re.sub(r'href="#', f'href="#{slug}-', text)
    text = text.replace("url(#", f"url(#{slug}-")
    # A style element inside an inline SVG would apply to the whole page; as attributes it stays in the figure.
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.S)
    # Hundredths of a point are invisible; more digits double the file.
    text = re.sub(r"(\d+\.\d{2})\d+", r"\1", text)
    # A generic family keeps the text readable where the fonts of this machine are missing.
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", "sans-serif", text)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    head = f'<svg role="img" aria-labelledby="{slug}-title" stroke-linejoin="round"'
    text = text.replace("<svg", head, 1)
    return re.sub(
        r"(<svg[^>]*>)", rf'\1<title id="{slug}-title">{escape(title)}</title>', text, count=1
    )


def themed(svg: str) -> str:
    """Same SVG for an HTML page: ink, grid and paper become CSS variables, so dark mode can recolour them."""
    for colour, variable in (
        (INK, "--ink"),
        (GRID, "--line"),
        (PAPER, "--paper"),
        (MUTED, "--muted"),
    ):
        svg = svg.replace(colour, f"var({variable})")
    return svg


def _shape_order(rows: pd.DataFrame, shapes: Sequence[Mapping]) -> list[tuple[str, int, int]]:
    seen = {
        s: (int(n), int(k)) for s, n, k in zip(rows["shape"], rows["N"], rows["K"], strict=True)
    }
    names = [s["name"] for s in shapes if s["name"] in seen]
    names += sorted(set(seen) - set(names))
    return [(name, *seen[name]) for name in names]


# ---- the figures -------------------------------------------------------------------------------------------------


def fig_latency(
    cells: pd.DataFrame,
    shapes: Sequence[Mapping],
    *,
    columns: int = 3,
    regime: str = HEADLINE_REGIME,
) -> str:
    """Figure 1: time per call (us) against M, both axes logarithmic, one panel a shape.

    One line per kernel and format with 95% intervals; dotted: the stream floor of the same bytes, per format.
    Raises ValueError when no cell of `regime` may be drawn.
    """
    name = f"fig1-c{columns}"
    rows = timed(cells, regime)
    rows = rows[rows["role"] != "floor"]
    if rows.empty:
        raise ValueError(f"figure 1: no timed cell with correctness passed in regime {regime}")
    floor = floors(cells, regime)
    kernels = set(rows["kernel"])
    panels = _shape_order(rows, shapes)
    with matplotlib.rc_context(rc_of(name)):
        fig, axes = new_canvas(columns, len(panels), 2.75)
        for ax, (shape, n, k) in zip(axes, panels, strict=True):
            here = rows[rows["shape"] == shape]
            for fmt, line in floor[floor["shape"] == shape].groupby("format", sort=True):
                ax.plot(
                    line["M"], line["floor_us"], color=_colour(fmt), linestyle=":", linewidth=1.1
                )
            for kernel, fmt in _series(here):
                line = here[(here["kernel"] == kernel) & (here["format"] == fmt)].sort_values("M")
                marker, dash = _style(kernel)
                low = (line["time_us"] - line["ci_low_us"]).clip(lower=0).fillna(0)
                high = (line["ci_high_us"] - line["time_us"]).clip(lower=0).fillna(0)
                ax.errorbar(
                    line["M"],
                    line["time_us"],
                    yerr=[low, high],
                    color=_colour(fmt),
                    marker=marker,
                    linestyle=dash,
                    markersize=3.6,
                    elinewidth=1.6,
                    **_width(kernel, kernels),
                )
            house_axes(ax)
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FuncFormatter(plain_number))
            ax.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
            m_axis(ax, rows["M"])
            ax.set_ylabel("time per call (µs)")
            ax.set_title(f"{shape}: N={n}, K={k}")
        handles = [_handle(kernel, fmt) for kernel, fmt in _series(rows)]
        if len(floor):
            handles.append(
                Line2D(
                    [],
                    [],
                    color=MUTED,
                    linestyle=":",
                    label="stream floor of the same bytes (colour = format)",
                )
            )
        draw_legend(fig, handles, columns if columns == 1 else 4)
        return svg_of(
            fig, name, f"Figure 1: time per call against M, regime {regime}, one panel a shape"
        )


def fig_floor_fraction(
    cells: pd.DataFrame, *, columns: int = 3, regime: str = HEADLINE_REGIME
) -> str:
    """Figure 2: percent of the size-matched measured floor (100 * floor_us / time_us) against M, one panel a format.

    Line: median over shapes; band: lowest to highest shape, of our kernels alone where they are.
    Raises ValueError when no cell has both times.
    """
    name = f"fig2-c{columns}"
    rows = timed(cells, regime)
    rows = rows[(rows["role"] != "floor") & rows["floor_us"].notna()]
    if rows.empty:
        raise ValueError(f"figure 2: no timed cell with a measured floor in regime {regime}")
    rows = rows.assign(percent=100.0 * rows["floor_us"] / rows["time_us"])
    present = set(rows["format"])
    panels = [f for f in FORMAT_COLOUR if f in present] + sorted(present - set(FORMAT_COLOUR))
    top = max(100.0, float(rows["percent"].max())) * 1.04
    with matplotlib.rc_context(rc_of(name)):
        fig, axes = new_canvas(columns, len(panels), 2.75)
        for ax, fmt in zip(axes, panels, strict=True):
            here = rows[rows["format"] == fmt]
            kernels = set(here["kernel"])
            banded = kernels & set(OURS) or kernels
            for kernel, _ in _series(here):
                by_m = _of_most_shapes(here[here["kernel"] == kernel]).groupby("M")["percent"]
                middle, low, high = by_m.median(), by_m.min(), by_m.max()
                marker, dash = _style(kernel)
                if kernel in banded:
                    ax.fill_between(
                        middle.index, low, high, color=_colour(fmt), alpha=0.16, linewidth=0
                    )
                ax.plot(
                    middle.index,
                    middle,
                    color=_colour(fmt),
                    marker=marker,
                    linestyle=dash,
                    markersize=3.6,
                    **_width(kernel, kernels),
                )
            ax.axhline(100.0, color=INK, linestyle=":", linewidth=1.1)
            house_axes(ax)
            m_axis(ax, rows["M"])
            ax.set_ylim(0, top)
            ax.set_ylabel("% of the measured floor")
            ax.set_title(FORMAT_NAME.get(fmt, fmt))
        handles = [_handle(kernel, fmt) for kernel, fmt in _series(rows)]
        handles.append(Line2D([], [], color=INK, linestyle=":", label="the floor itself (100 %)"))
        draw_legend(fig, handles, columns if columns == 1 else 4)
        return svg_of(
            fig, name, f"Figure 2: percent of the measured floor against M, regime {regime}"
        )


def _of_most_shapes(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one kernel at those M that more than half as many shapes have as the M with most: a line has no kinks."""
    shapes = rows.groupby("M")["shape"].transform("nunique")
    return rows[2 * shapes > shapes.max()]


def fig_roofline(
    cells: pd.DataFrame,
    *,
    bytes_per_weight: Mapping[str, float],
    bandwidth_tbps: float,
    ceilings_tflops: Mapping[str, float],
    columns: int = 3,
    regime: str = HEADLINE_REGIME,
) -> str:
    """Figure 4: achieved TFLOP/s against arithmetic intensity (FLOP per byte), one panel per kernel and format.

    Work is 2*M*N*K FLOP. Bytes are the least a call must move: N*K*bytes_per_weight[format] for the weights, M*K
    activations (1 byte each for fp8_e4m3, else 2) and M*N BF16 outputs. The slope is the measured bandwidth asymptote
    (TB/s), the ceilings are measured compute rates (TFLOP/s); both come from the campaign's constants.
    Raises ValueError when nothing may be drawn or a format has no bytes per weight.
    """
    name = f"fig4-c{columns}"
    rows = timed(cells, regime)
    rows = rows[rows["role"] != "floor"]
    if rows.empty:
        raise ValueError(f"figure 4: no timed cell with correctness passed in regime {regime}")
    if unknown := sorted(set(rows["format"]) - set(bytes_per_weight)):
        raise ValueError(f"figure 4: no bytes per weight for format {unknown[0]}")
    m, n, k = (rows[c].astype(float) for c in ("M", "N", "K"))
    flop = 2.0 * m * n * k
    activation = rows["format"].map(lambda f: 1.0 if f == "fp8_e4m3" else 2.0)
    moved = n * k * rows["format"].map(dict(bytes_per_weight)) + m * k * activation + 2.0 * m * n
    rows = rows.assign(intensity=flop / moved, tflops=flop / rows["time_us"] * 1e-6)
    panels = _series(rows)
    # The ends of the palette are cut off: near-black vanishes on dark paper, near-yellow on white.
    palette = LinearSegmentedColormap.from_list("m", ["#56b4e9", "#0072b2", "#cc79a7", "#d55e00"])
    scale = LogNorm(vmin=max(1, rows["M"].min()), vmax=max(2, rows["M"].max()))
    x_low, x_high = rows["intensity"].min() / 1.6, rows["intensity"].max() * 1.6
    top = max(ceilings_tflops.values(), default=rows["tflops"].max())
    x_high = max(x_high, 2.0 * top / bandwidth_tbps)
    y_low = rows["tflops"].min() / 2
    with matplotlib.rc_context(rc_of(name)):
        fig, axes = new_canvas(columns, len(panels), 2.75)
        for ax, (kernel, fmt) in zip(axes, panels, strict=True):
            here = rows[(rows["kernel"] == kernel) & (rows["format"] == fmt)]
            ax.plot(
                [x_low, top / bandwidth_tbps],
                [x_low * bandwidth_tbps, top],
                color=INK,
                linewidth=1.1,
            )
            for ceiling, dash in zip(sorted(ceilings_tflops), ("--", "-.", ":", "-"), strict=False):
                rate = ceilings_tflops[ceiling]
                ax.plot(
                    [rate / bandwidth_tbps, x_high],
                    [rate, rate],
                    color=INK,
                    linestyle=dash,
                    linewidth=1.1,
                )
            ax.scatter(
                here["intensity"],
                here["tflops"],
                c=here["M"],
                cmap=palette,
                norm=scale,
                marker=_style(kernel)[0],
                s=13,
                linewidths=0.9,
            )
            house_axes(ax)
            ax.set_xscale("log")
            ax.set_yscale("log")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_formatter(FuncFormatter(plain_number))
                axis.set_minor_locator(NullLocator())
            ax.set_xlim(x_low, x_high)
            ax.set_ylim(y_low, top * 1.8)
            ax.set_xlabel("FLOP per byte")
            ax.set_ylabel("TFLOP/s")
            ax.set_title(_label(kernel, fmt))
        handles = [Line2D([], [], color=INK, label=f"measured bandwidth {bandwidth_tbps:.3g} TB/s")]
        for ceiling, dash in zip(sorted(ceilings_tflops), ("--", "-.", ":", "-"), strict=False):
            text = f"measured {ceiling} ceiling {ceilings_tflops[ceiling]:.4g} TFLOP/s"
            handles.append(Line2D([], [], color=INK, linestyle=dash, label=text))
        for m in sorted(set(rows["M"]) & {1, 8, 64, 512, 4096}):
            dot = {"marker": "o", "linestyle": "none", "color": palette(scale(m))}
            handles.append(Line2D([], [], label=f"M = {m}", **dot))
        draw_legend(fig, handles, columns)
        return svg_of(
            fig, name, f"Figure 4: roofline, regime {regime}, one panel per kernel and format"
        )


def fig_forest(rows: pd.DataFrame, *, family: str, unit: str, columns: int = 2) -> str:
    """Predicted band against observed interval of the point claims of one family, one claim a line.

    `rows`: claim, q05, q25, q50, q75, q95, observed, ci_low, ci_high, verdict (units of `unit`, all finite).
    Thin bar: predicted 5 to 95%; thick bar: 25 to 75%; tick: median; marker with whisker: observation with its 95%
    interval. The axis is logarithmic unless a value is not positive. `columns`=1 puts each label above its line.
    """
    if rows.empty:
        raise ValueError(f"forest of {family}: no measured point claim")
    narrow = columns == 1
    name = f"forest-{family}-{unit}-c{columns}"
    pitch = 0.5 if narrow else 0.24
    rows = rows.sort_values("claim", key=lambda c: c.map(natural), kind="stable").reset_index(
        drop=True
    )
    numbers = rows[["q05", "q95", "observed", "ci_low", "ci_high"]]
    with matplotlib.rc_context(rc_of(name)):
        fig = Figure(
            figsize=(3.7 if narrow else 10.4, pitch * len(rows) + 1.25),
            layout="constrained",
            facecolor=PAPER,
        )
        FigureCanvasSVG(fig)
        ax = fig.add_subplot()
        predicted = FORMAT_COLOUR["mxfp4"]
        for i, row in rows.iterrows():
            up, down = (i, i + 0.26) if narrow else (i - 0.13, i + 0.2)
            ax.plot([row["q05"], row["q95"]], [up, up], color=predicted, linewidth=1.3)
            ax.plot([row["q25"], row["q75"]], [up, up], color=predicted, linewidth=4.5)
            ax.plot([row["q50"]], [up], color=PAPER, marker="|", markersize=5, markeredgewidth=1.6)
            seen = FORMAT_COLOUR["fp8_e4m3"] if row["verdict"] == "MISS" else INK
            ax.plot([row["ci_low"], row["ci_high"]], [down, down], color=seen, linewidth=1.3)
            ax.plot(
                [row["observed"]],
                [down],
                color=seen,
                marker=VERDICT_MARK.get(row["verdict"], "s"),
                markersize=4.8,
                linestyle="none",
            )
        pairs = zip(_short_names([*rows["claim"]]), rows["verdict"], strict=True)
        texts = [f"{label}  [{verdict}]" for label, verdict in pairs]
        if narrow:
            ax.set_yticks([])
            for i, text in enumerate(texts):
                ax.text(
                    0.01,
                    i - 0.32,
                    text,
                    transform=ax.get_yaxis_transform(),
                    va="center",
                    fontsize=8.5,
                )
        else:
            ax.set_yticks(range(len(rows)), texts)
            ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        house_axes(ax)
        ax.grid(False, axis="y")
        if (numbers > 0).all(axis=None):
            ax.set_xscale("log")
            _log_ticks(ax, float(numbers.min(axis=None)), float(numbers.max(axis=None)))
        ax.set_xlabel(UNIT_NAME.get(unit, unit))
        handles = [
            Line2D([], [], color=predicted, linewidth=1.3, label="predicted 5–95 %"),
            Line2D(
                [], [], color=predicted, linewidth=4.5, label="predicted 25–75 %, median notched"
            ),
            Line2D([], [], color=INK, linewidth=1.3, marker="o", label="observed, 95 % interval"),
        ]
        draw_legend(fig, handles, columns)
        return svg_of(
            fig, name, f"Predicted bands and observed intervals of the claims {family} in {unit}"
        )


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key in which m2 comes before m16: digits compare as numbers."""
    parts = re.split(r"(\d+)", str(name))
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


def _short_names(names: list[str]) -> list[str]:
    """Names without the dotted prefix that all share; a single name stays whole."""
    if len(names) < 2:
        return names
    shared = os.path.commonprefix(names)
    return [name[shared.rfind(".") + 1 :] for name in names]


def _log_ticks(ax: Axes, low: float, high: float) -> None:
    """1-2-5 ticks inside [low, high] widened by 10%; every second decade step is dropped when they crowd."""
    low, high = low / 1.1, high * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (
        (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
        (1, 1.5, 2, 3, 5, 7),
        (1, 2, 5),
        (1, 3),
        (1,),
    ):
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) <= 7:
            break
    ax.set_xlim(low, high)
    ax.set_xticks(ticks, [plain_number(t) for t in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


# ---- all of them -------------------------------------------------------------------------------------------------


def measured_point_claims(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Point and share claims that statistics decided; all their numbers are present."""
    need = ["q05", "q25", "q50", "q75", "q95", "observed", "ci_low", "ci_high"]
    banded = verdicts["kind"].isin(["point", "share"])
    point = verdicts[banded & verdicts["verdict"].isin(list(VERDICT_MARK))]
    return point.dropna(subset=need)


def build_all(
    *,
    cells: pd.DataFrame,
    verdicts: pd.DataFrame,
    claims: Sequence[Mapping],
    campaigns: Sequence[Mapping],
    shapes: Sequence[Mapping],
    bytes_per_weight: Mapping[str, float],
    processes: int = 1,
    more: Sequence[Callable[[], dict[str, str]]] = (),
) -> dict[str, str]:
    """Every figure that the data allow, name -> SVG text; each also as `<name>_narrow` for small screens.

    Drawn by so many `processes`: a figure depends on nothing but its own data. `more`: what draws others, name -> SVG.

    Names: fig1_latency, fig2_floor, fig4_roofline, forest/<family>/<unit> ("TB/s" as "TB-per-s"). A figure without
    data is left out: the report then shows NOT_RUN in its place.
    """
    refuse_timed_reference(cells)
    newest = drawn_once(of_the_set(newest_cells(cells, campaigns), shapes))
    drawn = timed(newest, HEADLINE_REGIME)
    draws: dict[str, Callable[[], str]] = {}

    def put(name: str, draw: Callable[..., str], wide: int = 3) -> None:
        draws[name] = partial(draw, columns=wide)
        draws[f"{name}_narrow"] = partial(draw, columns=1)

    arms = drawn[drawn["role"] != "floor"] if len(drawn) else drawn
    if len(arms):
        put("fig1_latency", partial(fig_latency, newest, shapes))
        if arms["floor_us"].notna().any():
            put("fig2_floor", partial(fig_floor_fraction, newest))
        constants = roofline_constants(campaigns)
        if constants is not None:
            bandwidth, ceilings = constants
            put(
                "fig4_roofline",
                partial(
                    fig_roofline,
                    newest,
                    bytes_per_weight=bytes_per_weight,
                    bandwidth_tbps=bandwidth,
                    ceilings_tflops=ceilings,
                ),
            )
    family = {c["id"]: c["family"] for c in claims}
    point = measured_point_claims(verdicts)
    if len(point):
        point = point.assign(family=point["claim"].map(lambda c: family.get(c, "unregistered")))
        for (name, unit), rows in point.groupby(["family", "unit"], sort=True):
            put(
                f"forest/{name}/{unit.replace('/', '-per-')}",
                partial(fig_forest, rows, family=name, unit=unit),
                wide=2,
            )
    # matplotlib makes so many objects that the collector would walk the campaigns again and again.
    gc.freeze()
    found: dict[str, str] = {}
    if processes == 1:
        found = {name: draw() for name, draw in draws.items()}
        others = [draw() for draw in more]
    else:
        with ProcessPoolExecutor(processes) as pool:
            waiting = [pool.submit(draw) for draw in more]
            found = dict(zip(draws, pool.map(_drawn, draws.values()), strict=True))
            others = [one.result() for one in waiting]
    for other in others:
        found |= other
    return found


def _drawn(draw: Callable[[], str]) -> str:
    return draw()


def roofline_constants(campaigns: Sequence[Mapping]) -> tuple[float, dict[str, float]] | None:
    """Bandwidth asymptote (TB/s) and compute ceilings (name -> TFLOP/s) of the newest campaign that measured both.

    None where no campaign has both; see `lab.constants` for how they are measured.
    """
    for campaign in sorted(campaigns, key=lambda c: (c["created_utc"], c["id"]), reverse=True):
        constants = campaign.get("constants") or {}
        ceilings = {
            label: float(constants[name]["value"])
            for name, label in CEILINGS.items()
            if name in constants
        }
        if BANDWIDTH in constants and ceilings:
            return float(constants[BANDWIDTH]["value"]), ceilings
    return None
