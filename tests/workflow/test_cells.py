"""cells.csv has the agreed columns, six significant digits, and one row a cell."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from lab import cells

HEADER = (
    "campaign,device,rung,kernel,role,format,shape,N,K,M,regime,"
    "time_us,ci_low_us,ci_high_us,floor_us,correctness"
)
TIME = {"time_us": 12.345678, "ci_low_us": 12.0, "ci_high_us": 12.5000001, "n_blocks": 8}
FLOOR = {"time_us": 1 / 3, "ci_low_us": 0.3, "ci_high_us": 0.4}


def cell(kernel: str = "cublaslt_fp8", m: int = 1, **more) -> dict:
    base = {
        "kernel": kernel,
        "role": "baseline",
        "format": "fp8_e4m3",
        "shape": "kv_gqa",
        "N": 1024,
        "K": 4096,
        "M": m,
        "regime": "cold_graph",
        "weight_bytes": 4194304,
        "tuning": None,
        "correctness": "passed",
        "time": TIME,
        "floor": FLOOR,
    }
    return base | more


def campaign(root: Path, rows: list[dict], name: str = "r0-x-20261130-000000000000") -> Path:
    folder = root / name
    folder.mkdir()
    value = {"rung": "R0", "device": {"name": "NVIDIA H200"}, "cells": rows}
    (folder / "campaign.json").write_text(json.dumps(value))
    return folder


def table(folders: list[Path]) -> pd.DataFrame:
    """The cells of folders that hold nothing but campaign.json: what a campaign must be is the records' business."""
    return cells.table(folders, verify=lambda folder: [])


def test_text(tmp_path: Path) -> None:
    reference = cell("reference", role="correctness_only", time=None, floor=None)
    folder = campaign(tmp_path, [reference, cell(m=16), cell(m=2)])
    text = cells.to_csv(table([folder]))
    row = "r0-x-20261130-000000000000,NVIDIA H200,R0,{},{},fp8_e4m3,kv_gqa,1024,4096,{},cold_graph,{},passed"
    assert text.splitlines() == [
        HEADER,
        row.format("cublaslt_fp8", "baseline", 2, "12.3457,12,12.5,0.333333"),
        row.format("cublaslt_fp8", "baseline", 16, "12.3457,12,12.5,0.333333"),
        row.format("reference", "correctness_only", 1, ",,,"),
    ]


def test_no_campaign_gives_the_header_alone() -> None:
    assert cells.to_csv(table([])) == HEADER + "\n"


def test_read_gives_back_what_was_written(tmp_path: Path) -> None:
    frame = table([campaign(tmp_path, [cell(), cell("reference", time=None, floor=None)])])
    cells.write(frame, tmp_path / "cells.csv")
    back = cells.read(tmp_path / "cells.csv")
    pd.testing.assert_frame_equal(back, frame, check_dtype=False, rtol=1e-5)
    assert cells.to_csv(back) == cells.to_csv(frame)


def test_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    rows = [cell(m=m) for m in (4, 1, 16)]
    one = table([campaign(tmp_path, rows)])
    (tmp_path / "b").mkdir()
    other = table([campaign(tmp_path / "b", rows[::-1])])
    assert cells.to_csv(one) == cells.to_csv(other)


def test_a_cell_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_gqa.*twice"):
        table([campaign(tmp_path, [cell(), cell()])])
