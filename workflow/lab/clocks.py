"""Were the clocks steady? Telemetry readings, joined by time to the legs during which they were taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab.device import THROTTLE_REASONS

#: Bands of M (lowest, highest): reading sets the time, the change-over, arithmetic sets the time.
M_BANDS = ((1, 64), (65, 1023), (1024, 1 << 30))
POINT = ("shape", "N", "K", "M", "regime")


def steadiness(legs: pd.DataFrame, telemetry: pd.DataFrame) -> dict[str, Any] | None:
    """How often the software power cap held the clock down during legs, and the clock and power by band of M.

    `readings` taken while a leg ran, `capped` the share of them with the cap (0 to 1), `bands` the same for each band
    of M with `m_low` and `m_high` as measured, and medians `sm_clock_mhz` and `power_w`; a quantity that the device
    does not report is None. None where no reading fell into a leg.
    """
    readings = readings_during(legs, telemetry)
    if readings.empty:
        return None
    bands = []
    for low, high in M_BANDS:
        band = readings[readings["M"].between(low, high)]
        if len(band):
            ends = {"m_low": int(band["M"].min()), "m_high": int(band["M"].max())}
            bands.append(ends | _summary(band))
    return _summary(readings) | {"bands": bands}


def readings_during(
    legs: pd.DataFrame, telemetry: pd.DataFrame, names: Sequence[str] = POINT
) -> pd.DataFrame:
    """The readings that fell between start and end of a leg, with the leg's point. Legs run one at a time.

    names: the columns of a leg that its readings get.
    """
    if legs.empty or telemetry.empty:
        return telemetry.iloc[:0].assign(**{name: None for name in names} | {"M": 0})
    legs = legs.sort_values("start_ns")
    times = telemetry["t_ns"].to_numpy()
    last = np.searchsorted(legs["start_ns"].to_numpy(), times, side="right") - 1
    inside = (last >= 0) & (times <= legs["end_ns"].to_numpy()[last])
    return telemetry[inside].assign(**{name: legs[name].to_numpy()[last[inside]] for name in names})


def by_arm(legs: pd.DataFrame, telemetry: pd.DataFrame, lowest_m: int) -> pd.DataFrame:
    """Readings of cold legs from `lowest_m` on: one row a kernel, format and M, over all shapes.

    Medians `sm_clock_mhz` and `power_w`, and `capped`, the share of readings with the software power cap (0 to 1);
    an arm that no reading fell into is not there.
    """
    key = ["kernel", "format", "M"]
    legs = legs[(legs["M"] >= lowest_m) & (legs["regime"] == "cold_graph")]
    readings = readings_during(legs, telemetry, (*POINT, "kernel", "format"))
    if readings.empty:
        return pd.DataFrame(columns=[*key, "readings", "sm_clock_mhz", "power_w", "capped"])
    reasons = readings["throttle_reasons"].fillna(0).astype("int64")
    readings = readings.assign(
        capped=((reasons & THROTTLE_REASONS["sw_power_cap"]) != 0)
        .astype(float)
        .where(readings["throttle_reasons"].notna()),
        **{name: pd.to_numeric(readings[name]) for name in ("sm_clock_mhz", "power_w")},
    )
    return (
        readings.groupby(key, sort=True)
        .agg(
            readings=("t_ns", "size"),
            sm_clock_mhz=("sm_clock_mhz", "median"),
            power_w=("power_w", "median"),
            capped=("capped", "mean"),
        )
        .reset_index()
    )


def _summary(readings: pd.DataFrame) -> dict[str, Any]:
    reasons = readings["throttle_reasons"].dropna().astype("int64")
    capped = (reasons & THROTTLE_REASONS["sw_power_cap"]) != 0
    return {
        "readings": len(readings),
        "capped": float(capped.mean()) if len(reasons) else None,
        **{name: _median(readings[name]) for name in ("sm_clock_mhz", "power_w")},
    }


def _median(values: pd.Series) -> float | None:
    known = pd.to_numeric(values).dropna()
    return float(known.median()) if len(known) else None
