"""The production gap: how fast the kernels that are in use run beside FP8, BF16 and the floor, and what room there is.

A speed is time(against) / time(kernel). `realised` is that speed over the ratio of the bytes that the two read: the
part of the saving of bytes that arrives as speed. It is 1 for a kernel that is faster by all the bytes that it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lab import statistics
from lab.arm_times import Arm, ArmTimes, Point, Spread, spread
from lab.decomposition import FLOOR, FULL, NONE
from lab.statistics import Estimate
from qgemm_mx.formats import bytes_per_weight

FP8, BF16 = Arm("cublaslt_fp8", "fp8_e4m3"), Arm("cublaslt_bf16", "bf16")
REGIMES = ("cold_graph", "hot_graph", "cold_loop")
SETS = ("all", "frozen", "large")
ROLES = ("peer", "product")
#: The peer that stands for today's production path: what vLLM takes first on Hopper, with 16-bit activations.
PRODUCTION = "peer/humming_bf16"
COLUMNS = (
    "campaign", "over", "kernel", "role", "format", "regime", "M", "against", "shapes",
    "speed", "ci_low", "ci_high", "lowest", "lowest_shape", "highest", "highest_shape",
    "byte_ratio", "realised", "realised_low", "realised_high",
)  # fmt: skip


def shapes_of(shapes: Sequence[Mapping[str, Any]], subset: str) -> list[str]:
    """Names of the shapes of a set: "all", "frozen" or "large"."""
    return [s["name"] for s in shapes if subset in ("all", s["set"])]


def byte_ratio(against: str, fmt: str) -> float:
    """Bytes of a weight in format `against` over those in `fmt`, scales included."""
    return bytes_per_weight(against) / bytes_per_weight(fmt)


def table(times: ArmTimes, shapes: Sequence[Mapping[str, Any]], campaign: str) -> pd.DataFrame:
    """One row per kernel in use (and the testbed), format, regime, M, set of shapes and rival, with ``COLUMNS``.

    Geometric means over the shapes that both were timed on: `shapes` says how many.
    """
    known = {s["name"] for s in shapes}
    points: dict[tuple[Arm, str, str, int], list[Point]] = {}
    for arm, point, cell in times:
        shown = cell.role in ROLES or arm.kernel == FULL
        if shown and point.shape in known and point.regime in REGIMES:
            points.setdefault((arm, cell.role, point.regime, point.M), []).append(point)
    rows = []
    for (arm, role, regime, m), own in points.items():
        for rival in (FP8, BF16, Arm(FLOOR, arm.format)):
            ratios = speeds(times, arm, rival, own)
            for subset in SETS:
                names = set(shapes_of(shapes, subset))
                found = spread([(shape, ratio) for shape, ratio in ratios if shape in names])
                if found is not None:
                    where = (campaign, subset, arm.kernel, role, arm.format, regime, m)
                    ratio = byte_ratio(rival.format, arm.format)
                    rows.append([*where, rival.kernel, *_numbers(found, ratio)])
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    by = {"regime": REGIMES, "over": SETS, "against": (FP8.kernel, BF16.kernel, FLOOR)}
    order = ["role", "kernel", "format", "regime", "over", "M", "against"]
    return frame.sort_values(
        order, key=lambda s: s.map(by[s.name].index) if s.name in by else s, ignore_index=True
    )


def speeds(
    times: ArmTimes, arm: Arm, rival: Arm, points: Iterable[Point]
) -> list[tuple[str, Estimate]]:
    """time(rival) / time(arm) at those of some points where both were timed, with the name of the shape."""
    ratios = [(p.shape, times.ratio((rival, p), (arm, p))) for p in points]
    return [(shape, ratio) for shape, ratio in ratios if ratio is not None]


def _numbers(found: Spread, ratio: float) -> list[Any]:
    low, high = found.mean.interval()
    speed = found.mean.value
    ends = [found.lowest, found.lowest_shape, found.highest, found.highest_shape]
    return [
        found.shapes, speed, low, high, *ends,
        ratio, speed / ratio, low / ratio, high / ratio,
    ]  # fmt: skip


def format_speeds(frame: pd.DataFrame, formats: Iterable[str]) -> dict[str, float | None]:
    """Speed over FP8 of the production path at M = 1, cold, over all shapes, by format; None where there is none."""
    own = frame[
        (frame["kernel"] == PRODUCTION)
        & (frame["over"] == "all")
        & (frame["regime"] == REGIMES[0])
        & (frame["M"] == 1)
        & (frame["against"] == FP8.kernel)
    ].set_index("format")["speed"]
    return {fmt: float(own[fmt]) if fmt in own.index else None for fmt in formats}


# ---- go or no-go for R2 ------------------------------------------------------------------------------------------

#: P3 of the source: the speed over FP8 that is claimed at M <= 4, and the one below which it counts as falsified.
CLAIMED, FALSIFIED = 1.5, 1.2
DECODE_M = (1, 2, 4)
PROBE_BALANCED = "probe/balanced_grid"


@dataclass(frozen=True)
class Decision:
    """Whether R2 is worth building. word: GO, NO-GO or OPEN.

    room: speed over FP8 of a kernel as fast as the floor at M in ``DECODE_M``, over `shapes` frozen shapes; room_m1:
    the same at M=1. reached: what some kernel or bound reaches at M=1, by name. need: how many times the floor's time a
    kernel may take and still reach ``CLAIMED``.
    """

    word: str
    room: Estimate | None
    room_m1: Estimate | None
    shapes: int
    reached: tuple[tuple[str, Estimate], ...]

    @property
    def need(self) -> float | None:
        """Times the floor that still gives the claimed speed."""
        return None if self.room is None else self.room.value / CLAIMED


def decide(
    times: ArmTimes,
    bounds: Mapping[str, Sequence[Estimate]],
    shapes: Sequence[Mapping[str, Any]],
) -> Decision:
    """Go when the floor leaves room for 1.5x FP8 at M <= 4 (95% interval above it), no-go when it does not.

    `bounds` are further bounds at M=1 by name, as speeds over FP8, one a frozen shape (see `bounds_of`).
    """
    names = shapes_of(shapes, "frozen")
    size = {s["name"]: (s["N"], s["K"]) for s in shapes}
    floor = Arm(FLOOR, "mxfp4")

    def ratios(arm: Arm, ms: Iterable[int]) -> list[Estimate] | None:
        points = [Point(s, *size[s], m, REGIMES[0]) for s in names for m in ms]
        got = [times.ratio((FP8, p), (arm, p)) for p in points]
        return None if None in got else got

    def mean(parts: Sequence[Estimate] | None) -> Estimate | None:
        return statistics.geomean(parts) if parts else None

    room, room_m1 = mean(ratios(floor, DECODE_M)), mean(ratios(floor, [1]))
    reached = [(PRODUCTION, mean(ratios(Arm(PRODUCTION, "mxfp4"), [1])))]
    reached.append((FULL, mean(ratios(Arm(FULL, "mxfp4"), [1]))))
    reached += [
        (n, mean(parts) if len(parts) == len(names) else None) for n, parts in bounds.items()
    ]
    return Decision(
        word=_word(room, room_m1),
        room=room,
        room_m1=room_m1,
        shapes=len(names),
        reached=tuple((name, ratio) for name, ratio in reached if ratio is not None),
    )


def _word(room: Estimate | None, room_m1: Estimate | None) -> str:
    if room is None or room_m1 is None:
        return "OPEN"
    if room_m1.interval().high < FALSIFIED or room.interval().high < CLAIMED:
        return "NO-GO"
    return "GO" if room.interval().low > CLAIMED else "OPEN"


def bounds_of(
    times: ArmTimes, logs: Mapping[Point, pd.DataFrame], shapes: Sequence[Mapping[str, Any]]
) -> dict[str, list[Estimate]]:
    """Speed over FP8, at M=1 on each frozen shape, of what only bounds a kernel: no factors at all, a balanced grid.

    `logs` are the log block times of the MXFP4 testbed's arms by point. These arms give no right result: a bound, not a
    speed that anything has.
    """
    frozen, found = set(shapes_of(shapes, "frozen")), {}
    for name in (NONE, PROBE_BALANCED):
        for point, frame in logs.items():
            if point.shape not in frozen or point.M != 1 or name not in frame:
                continue
            ratio = times.over(FP8, point, frame[name])
            if ratio is not None:
                found.setdefault(name, []).append(ratio)
    return found
