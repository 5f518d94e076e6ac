"""The legs of a campaign as a table, and what follows from them alone: block values, cell times, drops.

A sample is one leg. A block is (shape, N, K, M, regime, block): its legs run interleaved, two for
each arm, and one dropped leg drops them all. An arm whose name ends in `#2` is the A/A duplicate of
another arm and has no cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lab.rows import (
    CORRECTNESS_ONLY_KERNEL,
    KEY_COLUMNS,
    REGIMES,
    ROLES,
    CampaignError,
    CellKey,
    CellTime,
)

DUPLICATE_SUFFIX = "#2"
LOOPED = "cold_loop"
LEGS_PER_BLOCK = 2

_TEXT, _INT, _NS, _REAL = pa.string(), pa.int32(), pa.int64(), pa.float64()
SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("kernel", _TEXT, nullable=False),
        pa.field("format", _TEXT, nullable=False),
        pa.field("role", _TEXT, nullable=False),
        pa.field("shape", _TEXT, nullable=False),
        pa.field("N", _INT, nullable=False),
        pa.field("K", _INT, nullable=False),
        pa.field("M", _INT, nullable=False),
        pa.field("regime", _TEXT, nullable=False),
        pa.field("arm", _TEXT, nullable=False),
        pa.field("block", _INT, nullable=False),
        pa.field("position", _INT, nullable=False),
        pa.field("extension", pa.bool_(), nullable=False),
        pa.field("nodes", _INT, nullable=False),
        pa.field("t_n_us", _REAL),
        pa.field("t_2n_us", _REAL),
        pa.field("time_us", _REAL),
        pa.field("intercept_us", _REAL),
        pa.field("start_ns", _NS, nullable=False),
        pa.field("end_ns", _NS, nullable=False),
        pa.field("dropped", pa.bool_(), nullable=False),
        pa.field("drop_reason", _TEXT),
    ]
)
TELEMETRY_SCHEMA = pa.schema(
    [
        pa.field("t_ns", _NS, nullable=False),
        pa.field("sm_clock_mhz", _REAL),
        pa.field("mem_clock_mhz", _REAL),
        pa.field("power_w", _REAL),
        pa.field("temperature_c", _REAL),
        pa.field("throttle_reasons", _NS),
    ]
)
_BLOCK = ["shape", "N", "K", "M", "regime", "block"]
_BLOCK_TIME_COLUMNS = ["kernel", "format", "role", "shape", "N", "K", "M", "regime", "arm", "block"]


def write_table(frame: pd.DataFrame, schema: pa.Schema, path: Path) -> None:
    """Write a table as zstd Parquet with exactly the columns of `schema`. CampaignError on another set of columns."""
    if set(frame.columns) != set(schema.names):
        odd = sorted(set(frame.columns) ^ set(schema.names))
        raise CampaignError(f"{path.name}: unknown or missing columns {odd}")
    try:
        table = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise CampaignError(
            f"{path.name}: a column has a value of the wrong type: {error}"
        ) from None
    pq.write_table(table, path, compression="zstd", compression_level=9)


def read_table(path: Path, schema: pa.Schema) -> pd.DataFrame:
    """Read what `write_table` wrote. CampaignError when the file is no such table."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise CampaignError(f"{path.name} cannot be read as Parquet: {error}") from None
    if not table.schema.equals(schema):
        raise CampaignError(
            f"{path.name} has columns {table.schema.names} of types {table.schema.types}"
        )
    return table.to_pandas()


def empty(schema: pa.Schema) -> pd.DataFrame:
    """A table without rows."""
    return schema.empty_table().to_pandas()


def check_samples(samples: pd.DataFrame) -> list[str]:
    """What is impossible in a table of legs, one sentence each with the number of rows; empty when all is well."""
    if missing := sorted(set(SAMPLES_SCHEMA.names) ^ set(samples.columns)):
        return [f"samples have unknown or missing columns {missing}"]
    if samples.empty:
        return []
    problems: list[str] = []

    def refuse(bad: pd.Series | np.ndarray, what: str) -> None:
        if rows := int(np.count_nonzero(bad)):
            first = samples[np.asarray(bad)].iloc[0]
            where = f"{first['arm']} {first['shape']} M={first['M']} {first['regime']} block {first['block']}"
            problems.append(f"{rows} samples {what}, the first of {where}")

    s = samples
    looped = s["regime"] == LOOPED
    refuse(~s["role"].isin(ROLES), "have an unknown role")
    refuse(~s["regime"].isin(REGIMES), "have an unknown regime")
    refuse(
        (s["role"] == "correctness_only") | (s["kernel"] == CORRECTNESS_ONLY_KERNEL),
        "are of a correctness_only kernel, which is never timed",
    )
    refuse(~np.isfinite(s["time_us"]), "have a time_us that is not a number")
    refuse(~s["dropped"] & (s["time_us"] <= 0), "have a time_us of 0 or less and are not dropped")
    refuse(~(s["t_n_us"] > 0) | np.isinf(s["t_n_us"]), "have no t_n_us above 0")
    for name in ("t_2n_us", "intercept_us"):
        refuse(
            ~looped & ~np.isfinite(s[name]), f"of a graph regime have a {name} that is not a number"
        )
    slope = np.where(looped, s["t_n_us"], s["t_2n_us"] - s["t_n_us"]) / s["nodes"]
    scale = np.where(looped, s["t_n_us"], s["t_2n_us"]) / s["nodes"]
    refuse(
        np.abs(s["time_us"] - slope) > 1e-9 * scale,
        "have a time_us that is not the slope of t_n_us and t_2n_us",
    )
    refuse(
        (s["nodes"] < 1) | (s["block"] < 0) | (s["position"] < 0),
        "have a count or a place below its least",
    )
    refuse(s["end_ns"] < s["start_ns"], "end before they start")
    refuse(
        s["dropped"] != s["drop_reason"].notna(),
        "are dropped without a reason, or have a reason but are kept",
    )
    refuse(s.duplicated([*_BLOCK, "position"]), "share a place in a block with another")
    legs = s.groupby([*_BLOCK, "arm"], sort=False)["arm"].transform("size")
    refuse(legs != LEGS_PER_BLOCK, f"are of an arm that has not {LEGS_PER_BLOCK} legs in the block")
    primary = s[~_duplicate_arm(s)]
    arms = primary.groupby(list(KEY_COLUMNS), sort=False)["arm"].nunique()
    problems += [f"cell {key} has {n} arms, not one" for key, n in arms[arms > 1].items()]
    return problems


def block_times(samples: pd.DataFrame) -> pd.DataFrame:
    """The value of each arm in each kept block: mean of log(time_us) of its legs.

    Columns: kernel, format, role, shape, N, K, M, regime, arm, block, log_time (log of microseconds). A block with a
    dropped leg is absent for all its arms.
    """
    lost = samples.groupby(_BLOCK, sort=False)["dropped"].transform("any").astype(bool)
    kept = samples[~lost]
    logs = kept.assign(log_time=np.log(kept["time_us"]))
    return logs.groupby(_BLOCK_TIME_COLUMNS, sort=False, as_index=False)["log_time"].mean()


class BlockLogs(NamedTuple):
    """Log times (log us) of an arm, shape [blocks], with the numbers of the blocks, rising."""

    blocks: np.ndarray
    logs: np.ndarray

    def paired(self, other: BlockLogs) -> tuple[np.ndarray, np.ndarray]:
        """Own and other log times of the blocks that both have, each of shape [shared]."""
        if np.array_equal(self.blocks, other.blocks):
            return self.logs, other.logs
        _, own, others = np.intersect1d(self.blocks, other.blocks, return_indices=True)
        return self.logs[own], other.logs[others]


def logs_of(
    blocks: pd.DataFrame, key: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], BlockLogs]]:
    """Split a table as of `block_times` by the columns `key`: (values of the key, its logs), by first appearance.

    All at once, as campaigns have thousands of arms: a data frame for each takes minutes in all.
    """
    if blocks.empty:
        return
    codes = blocks.groupby(list(key), sort=False).ngroup().to_numpy()
    number = blocks["block"].to_numpy()
    order = np.lexsort((number, codes))
    order = order[codes[order] >= 0]  # pandas gives -1 where a part of the key is missing
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    first = order[np.concatenate([[0], ends])]
    names = blocks[list(key)].iloc[first].itertuples(index=False, name=None)
    logs = blocks["log_time"].to_numpy(float)
    parts = zip(np.split(number[order], ends), np.split(logs[order], ends), strict=True)
    for name, part in zip(names, parts, strict=True):
        yield name, BlockLogs(*part)


def cell_times(samples: pd.DataFrame) -> dict[CellKey, CellTime]:
    """The time of every cell with at least two kept blocks: t interval over its block values, exponentiated."""
    from lab.statistics import sample_estimate  # SciPy takes a moment: only where it is needed

    blocks = block_times(samples)
    blocks = blocks[~_duplicate_arm(blocks)]
    times = {}
    for key, (_, logs) in logs_of(blocks, KEY_COLUMNS):
        if len(logs) >= 2:
            estimate = sample_estimate(logs)
            low, high = estimate.interval()
            times[_plain(key)] = CellTime(estimate.value, low, high, len(logs))
    return times


def cell_keys(samples: pd.DataFrame) -> set[CellKey]:
    """The cells that a table of legs speaks of."""
    return {
        _plain(key) for key in samples[list(KEY_COLUMNS)].drop_duplicates().itertuples(index=False)
    }


def cell_roles(samples: pd.DataFrame) -> set[tuple[Any, ...]]:
    """(role, *cell key) of every cell that a table of legs speaks of."""
    columns = ["role", *KEY_COLUMNS]
    rows = samples[columns].drop_duplicates().itertuples(index=False)
    return {(str(role), *_plain(tuple(key))) for role, *key in rows}


def dropped_blocks(samples: pd.DataFrame) -> pd.DataFrame:
    """Blocks and dropped blocks per (shape, N, K, M, regime): columns of that key, `blocks`, `dropped`, `fraction`."""
    per_block = samples.groupby(_BLOCK, sort=False, as_index=False)["dropped"].any()
    found = per_block.groupby(_BLOCK[:-1], sort=False, as_index=False).agg(
        blocks=("dropped", "size"), dropped=("dropped", "sum")
    )
    return found.assign(fraction=found["dropped"] / found["blocks"])


def leg_summary(samples: pd.DataFrame) -> dict[str, Any]:
    """Counts for the report: `total`, `dropped` and `extension` legs, and `reasons` of the dropped ones."""
    return {
        "total": len(samples),
        "dropped": int(samples["dropped"].sum()),
        "extension": int(samples["extension"].sum()),
        "reasons": {str(k): int(v) for k, v in samples["drop_reason"].value_counts().items()},
    }


def telemetry_summary(telemetry: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Least, median and greatest value of each sampled quantity that the device reports."""
    quantities = [c for c in TELEMETRY_SCHEMA.names if c not in ("t_ns", "throttle_reasons")]
    return {
        name: {"min": float(v.min()), "median": float(v.median()), "max": float(v.max())}
        for name in quantities
        if len(v := telemetry[name].dropna())
    }


def _duplicate_arm(frame: pd.DataFrame) -> pd.Series:
    return frame["arm"].str.endswith(DUPLICATE_SUFFIX).astype(bool)


def _plain(key: tuple[Any, ...]) -> CellKey:
    kernel, fmt, shape, n, k, m, regime = key
    return (str(kernel), str(fmt), str(shape), int(n), int(k), int(m), str(regime))
