"""Figure 5: speed against accuracy. A pure function from results to SVG text, in the house style of lab.figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation

from lab.accuracy import Result
from lab.figures import (
    FORMAT_COLOUR,
    FORMAT_NAME,
    INK,
    MUTED,
    PAPER,
    draw_legend,
    house_axes,
    new_canvas,
    plain_number,
    rc_of,
    svg_of,
)
from qgemm_mx.formats import bytes_per_weight

# The second code beside colour; MXFP4 has one colour and two scale rules.
MARKER = {
    ("mxfp4", "ocp_floor"): "v",
    ("mxfp4", "modelopt_ceil"): "^",
    ("nvfp4", "modelopt"): "o",
    ("int4_g128", "amax_over_7"): "s",
    ("int4_g64", "amax_over_7"): "D",
}
STAND_IN = "speed not measured yet, byte ratio"
BESIDE_POINTS = 6.0  # how far apart markers stand that share a speed


def fig_accuracy(
    results: Sequence[Result], speeds: Mapping[str, float | None], *, columns: int = 3
) -> str:
    """Figure 5: error (percent) against speed-up over FP8, one panel per weight, output and embedding error.

    `speeds` is format -> speed-up over FP8 (ratio above 0), None or absent where it is not measured; there the point
    stands, hollow, at the bytes of an FP8 weight over those of the format, and the axis and the legend say so.
    Points: total over the layers, or mean over the sentences; bars: lowest to highest layer, or to the worst sentence.
    Formats of the same speed are drawn some points apart. ValueError for no results and a speed that is not above 0.
    """
    name = f"fig5-c{columns}"
    if not results:
        raise ValueError("figure 5: no accuracy results")
    measured = {fmt: speed for fmt, speed in speeds.items() if speed is not None}
    for fmt, speed in measured.items():
        if not 0 < speed < float("inf"):
            raise ValueError(f"figure 5: the speed-up of {fmt} is {speed}, not a number above 0")
    places = [
        measured.get(r.format, bytes_per_weight("fp8_e4m3") / bytes_per_weight(r.format))
        for r in results
    ]
    hollow = [r.format not in measured for r in results]
    panels = {
        "weight error (%)": [
            (r.weight_error.total, r.weight_error.low, r.weight_error.high) for r in results
        ],
        "layer-output error (%)": [
            (r.output_error.total, r.output_error.low, r.output_error.high) for r in results
        ],
        "1 - embedding cosine (%)": [
            (1 - r.cosine_mean, 1 - r.cosine_mean, 1 - r.cosine_min) for r in results
        ],
    }
    with matplotlib.rc_context(rc_of(name)):
        fig, axes = new_canvas(columns, len(panels), 2.75)
        for ax, (label, values) in zip(axes, panels.items(), strict=True):
            house_axes(ax)
            for result, place, shift, empty, error in zip(
                results, places, _shifts(places), hollow, values, strict=True
            ):
                _point(ax, result, place, shift, empty, [100 * e for e in error])
            margin = max(0.04, 0.25 * (max(places) - min(places)))
            ax.set_xlim(min(places) - margin, max(places) + margin)
            ax.set_ylim(0, 108 * max(high for _, _, high in values))
            ax.yaxis.set_major_formatter(FuncFormatter(plain_number))
            ax.set_ylabel(label)
            ax.set_xlabel(_speed_label(hollow))
        handles = [
            Line2D([], [], label=_name(r), linestyle="none", **_look(r, empty))
            for r, empty in zip(results, hollow, strict=True)
        ]
        bars = "bar: all layers, or to the worst sentence"
        handles.append(Line2D([], [], color=MUTED, label=bars))
        if any(hollow):
            look = {"marker": "o", "color": INK, "markerfacecolor": PAPER, "markersize": 5}
            handles.append(Line2D([], [], linestyle="none", label=f"hollow: {STAND_IN}", **look))
        draw_legend(fig, handles, columns)
        return svg_of(
            fig, name, "Figure 5: error of each 4-bit format against its speed-up over FP8"
        )


def _speed_label(hollow: Sequence[bool]) -> str:
    if all(hollow):
        return "FP8 bytes over bytes (speed not measured yet)"
    return "speed-up over FP8 (ratio)"


def _shifts(places: Sequence[float]) -> list[float]:
    """Points by which each marker moves aside, so that those of one place stand around it."""
    total, seen = Counter(places), Counter()
    shifts = []
    for place in places:
        shifts.append(BESIDE_POINTS * (seen[place] - (total[place] - 1) / 2))
        seen[place] += 1
    return shifts


def _name(result: Result) -> str:
    name = FORMAT_NAME.get(result.format, result.format)
    return f"{name}, {result.scale_rule}" if result.format == "mxfp4" else name


def _look(result: Result, hollow: bool) -> dict:
    colour = FORMAT_COLOUR.get(result.format, MUTED)
    return {
        "color": colour,
        "marker": MARKER.get((result.format, result.scale_rule), "P"),
        "markerfacecolor": PAPER if hollow else colour,
        "markersize": 5,
    }


def _point(
    ax: Axes, result: Result, place: float, shift: float, hollow: bool, error: Sequence[float]
) -> None:
    middle, low, high = error
    aside = ScaledTranslation(shift / 72, 0, ax.figure.dpi_scale_trans)
    ax.errorbar(
        [place],
        [middle],
        yerr=[[middle - low], [high - middle]],
        transform=ax.transData + aside,
        elinewidth=1.2,
        linestyle="none",
        **_look(result, hollow),
    )
