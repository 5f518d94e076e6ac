"""The bars of the decode kernel (issue 4), judged as `lab.bars` judges any: which cells, which limits, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lab import bars, profile_r2, statistics
from lab.arm_times import Point
from lab.bars import MET, MISSED, NOT_RUN, UNDECIDED, Bar, Miss, Part, status_of
from lab.decode_r2 import CHAIN_SHAPE, CHAINED, COLD, HEADLINE, KERNEL, Decode, Link, growth
from lab.decomposition import FLOOR, Constants
from lab.page import number
from lab.profile_r2 import Profile
from lab.statistics import Estimate
from qgemm_mx.formats import weight_bytes

MS = (1, 2, 4, 8, 16)
CHAIN_MS = (1, 4, 16)
LARGE_BYTES = 30e6
FORMATS = ("mxfp4", "nvfp4")
#: Least speed over FP8 by format: geometric mean, and any one cell.
OVER_FP8 = {"mxfp4": (1.88, 1.4), "nvfp4": (1.78, 1.35)}
FLOOR_LARGE, FLOOR_SMALL, M16_OVER_M1, PEERS, CHAIN = 1.20, 1.45, 1.10, 1.0, 1.20
HOST_US, REGRET, PACK_MS = 10.0, 1.03, 50.0


def judge(
    cells: Sequence[Decode],
    chain: Sequence[Link],
    constants: Constants,
    profiled: Sequence[Profile],
    shapes: Sequence[Mapping[str, Any]],
) -> tuple[list[Bar], list[Miss]]:
    """Every bar in the order of the issue, and every cell that is not met, the worst first within a bar."""
    everything = len(shapes) * len(MS)
    by_format = {fmt: [c for c in cells if c.format == fmt and c.point.M in MS] for fmt in FORMATS}
    found: list[tuple[Bar, list[Miss]]] = []
    for fmt, own in by_format.items():
        found.append((_geomean(fmt, own, everything), []))
        found.append(bars.over_cells(*_least(fmt, own, profiled), everything))
    for large in (True, False):
        for fmt, own in by_format.items():
            planned = len(MS) * _sized(shapes, fmt, large)
            found.append(bars.over_cells(*_floor(fmt, own, profiled, large), planned))
    for fmt, own in by_format.items():
        found.append(bars.over_cells(*_growth(own, fmt, profiled), len(shapes)))
    for fmt, own in by_format.items():
        bar, parts = _peers(fmt, own, profiled)
        names = dict.fromkeys(p.against for p in parts)
        made, lost = bars.over_cells(bar, parts, everything * len(names))
        found.append((replace(made, how="; ".join(filter(None, (made.how, *names)))), lost))
    found.append(bars.over_cells(*_chain(chain), len(CHAIN_MS)))
    found += [(bars.of_constant(bar, key, constants), []) for bar, key in _CONSTANTS]
    return [bar for bar, _ in found], [miss for _, lost in found for miss in lost]


#: Bars about one number, and the constant that holds it.
_CONSTANTS = tuple(
    (Bar(name, text, None, "below", limit, unit, claim), key)
    for name, text, limit, unit, claim, key in (
        (
            "host", "host time of a plain Python call of linear", HOST_US, "us",
            "r2.bar.linear_host_overhead_us", "linear_host_overhead_us",
        ),
        (
            "pack", "packing 57344x8192 on the device", PACK_MS, "ms",
            None, "pack_weight_57344x8192_ms",
        ),
        (
            "regret", "time of the dispatch choice over exhaustive search, geometric mean", REGRET, "ratio",
            "r2.bar.dispatch_regret", "dispatch_regret",
        ),
    )
)  # fmt: skip


def _sized(shapes: Sequence[Mapping[str, Any]], fmt: str, large: bool) -> int:
    """Number of shapes whose weight in a format has at least, or less than, ``LARGE_BYTES``."""
    sizes = [weight_bytes(fmt, s["N"], s["K"]) for s in shapes]
    return sum((size >= LARGE_BYTES) == large for size in sizes)


def _least(fmt: str, own: Sequence[Decode], profiled: Sequence[Profile]) -> tuple[Bar, list[Part]]:
    text = "speed over cuBLASLt FP8, the slowest cell"
    claim = f"r2.bar.gemv_fp8_least.{fmt}"
    bar = Bar("fp8_least", text, fmt, "above", OVER_FP8[fmt][1], "ratio", claim)
    return bar, [
        Part(c.point, fmt, c.over_fp8, _why(c, profiled, fp8=True))
        for c in own
        if c.over_fp8 is not None
    ]


def _floor(
    fmt: str, own: Sequence[Decode], profiled: Sequence[Profile], large: bool
) -> tuple[Bar, list[Part]]:
    name, limit = ("large", FLOOR_LARGE) if large else ("small", FLOOR_SMALL)
    size = f"{LARGE_BYTES / 1e6:g} MB or more" if large else f"under {LARGE_BYTES / 1e6:g} MB"
    text = f"time over the size-matched floor, the slowest cell of a weight of {size}"
    claim = f"r2.bar.gemv_floor.{name}" if fmt == HEADLINE else None
    bar = Bar(f"floor_{name}", text, fmt, "below", limit, "ratio", claim)
    return bar, [
        Part(c.point, fmt, c.over_floor, _why(c, profiled))
        for c in own
        if c.over_floor is not None and (c.weight_bytes >= LARGE_BYTES) == large
    ]


def _peers(fmt: str, own: Sequence[Decode], profiled: Sequence[Profile]) -> tuple[Bar, list[Part]]:
    text = "speed over every installed peer, the slowest cell"
    bar = Bar("peers", text, fmt, "above", PEERS, "ratio", f"r2.bar.gemv_peer.{fmt}")
    return bar, [
        Part(c.point, fmt, ratio, _why(c, profiled), name)
        for c in own
        for name, ratio in c.peers.items()
    ]


def _geomean(fmt: str, own: Sequence[Decode], planned: int) -> Bar:
    limit = OVER_FP8[fmt][0]
    text = "speed over cuBLASLt FP8, geometric mean of all cells"
    claim = f"r2.bar.gemv_fp8_geomean.{fmt}"
    bar = Bar("fp8_geomean", text, fmt, "above", limit, "ratio", claim)
    used = [c for c in own if c.over_fp8 is not None]
    parts = [Part(c.point, fmt, c.over_fp8, "") for c in used]
    return bars.mean_of_cells(bar, parts, planned, lambda: _mean_reason(used, limit))


def _mean_reason(used: Sequence[Decode], limit: float) -> str:
    """How far the floors themselves would reach, and how far the kernel is from them."""
    reach = [c.reach for c in used if c.reach is not None]
    if not reach:
        return "no floor was measured beside these cells"
    over = statistics.geomean([c.over_floor for c in used if c.over_floor is not None]).value
    most = statistics.geomean(reach).value
    word = "more than" if most > limit else "and even that is less than"
    return (
        f"FP8's time over the floor of these bytes is {number(most)} in geometric mean: a kernel at the floor in every "
        f"cell would reach that, {word} {limit:g}; this one takes {number(over)} times the floor"
    )


def _why(cell: Decode, profiled: Iterable[Profile], fp8: bool = False) -> str:
    """By rule: how far the floor itself would reach where the bar is about FP8, then what the profiler counted."""
    parts = []
    if fp8 and cell.reach is not None:
        parts.append(f"at its floor it would reach {number(cell.reach.value)}")
    if fp8 and cell.over_floor is not None:
        parts.append(f"it takes {number(cell.over_floor.value)} times the floor")
    p = cell.point
    near = profile_r2.nearest(profiled, cell.format, p.N, p.K, p.M)
    return "; ".join([*parts, profile_r2.reason(near, p.N, p.K, p.M)])


def _growth(
    cells: Sequence[Decode], fmt: str, profiled: Sequence[Profile]
) -> tuple[Bar, list[Part]]:
    by_shape = {c.point.shape: c for c in cells if c.format == fmt and c.point.M == 16}
    parts = [
        Part(by_shape[name].point, fmt, ratio, _why(by_shape[name], profiled))
        for name, ratio in growth(cells, fmt)
    ]
    claim = "r2.bar.qgemv_m16_over_m1" if fmt == HEADLINE else None
    text = "time at M = 16 over time at M = 1, the slowest shape"
    return Bar("m16_over_m1", text, fmt, "below", M16_OVER_M1, "ratio", claim), parts


def _chain(chain: Sequence[Link]) -> tuple[Bar, list[Part]]:
    text = "makespan of the decode chain with programmatic launch over bytes / asymptotic bandwidth, the slowest M"
    bar = Bar("chain", text, HEADLINE, "below", CHAIN, "ratio", "r2.bar.chain_pdl_over_asymptote")
    parts = []
    for x in chain:
        if x.kernel == KERNEL and x.regime == CHAINED and x.over_asymptote is not None:
            point = Point(CHAIN_SHAPE, 0, 0, x.m, CHAINED)
            parts.append(Part(point, HEADLINE, x.over_asymptote, _chain_reason(x, chain)))
    return bar, parts


def _chain_reason(link: Link, chain: Sequence[Link]) -> str:
    """What a stream of the bytes and both ways of launching take of the bound, and what dependent launches save."""
    cold = {
        x.kernel: x.over_asymptote.value
        for x in chain
        if (x.m, x.regime) == (link.m, COLD) and x.over_asymptote is not None
    }
    if not {FLOOR, KERNEL} <= cold.keys():
        return "a stream of its bytes and plain launches of its layers were not both measured"
    own = link.over_asymptote.value
    rest = ": the rest is what the layers take beyond reading" if own > cold[FLOOR] else ""
    return (
        f"one stream of all the bytes takes {number(cold[FLOOR])} of the bound, plain launches of the layers "
        f"{number(cold[KERNEL])}, dependent ones {number(own)}{rest}{_gain(link.over_plain)}"
    )


def _gain(over_plain: Estimate | None) -> str:
    """What dependent launches save or cost."""
    if over_plain is None:
        return ""
    ratio = over_plain.value
    if ratio < 1:
        return f"; dependent launches save {number(100 * (1 - ratio), 2)} % of plain ones"
    return f"; dependent launches take {number(ratio)} times plain ones"


__all__ = ["MET", "MISSED", "NOT_RUN", "UNDECIDED", "Bar", "Miss", "judge", "status_of"]
