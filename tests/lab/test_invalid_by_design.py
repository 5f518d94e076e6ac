"""Testbed variants that are wrong by design: their legs are kept, and never become a time or a row of performance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import recorded

from lab import cells, records, rows, schema
from lab.journal import check_point
from lab.records import CampaignError, CellTime, Interval

WRONG = rows.INVALID_BY_DESIGN
VARIANT = "testbed/-dequant_issue"
GOOD_TIME = CellTime(5.0, 4.9, 5.1, 8)


def variant(**changes) -> rows.CellRow:
    return recorded.cell(**({"kernel": VARIANT, "role": "testbed", "correctness": WRONG} | changes))


def point(role: str = "testbed", correctness: str = WRONG) -> dict:
    """A point whose baseline runs beside a variant."""
    cells = [recorded.cell("stream_read", "floor"), recorded.cell(), variant()]
    arms = {**recorded.ARMS, VARIANT: (VARIANT, role, 4.5)}
    samples = recorded.legs(arms=arms)
    cells[2] = replace(cells[2], correctness=correctness)
    return {
        "cells": cells,
        "checks": [recorded.check(c) for c in cells[:2]],
        "samples": samples,
        "telemetry": recorded.telemetry(),
    }


def finished(tmp: Path) -> Path:
    partial = records.PartialCampaign.open(tmp / "partial", recorded.header(rung="R1"))
    partial.append_point("q_o_proj/M1", **point())
    return records.finalise(partial, tmp / "data")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"time": GOOD_TIME}, "has a time"),
        ({"floor": Interval(4.0, 3.9, 4.1)}, "can never have a floor"),
        ({"kernel": "cublaslt_fp8", "role": "baseline"}, "only a testbed kernel"),
        ({"kernel": "peer/humming_bf16", "role": "peer"}, "only a testbed kernel"),
        ({"kernel": "cublaslt_fp8"}, "of the role testbed"),
        ({"role": "product"}, "of the role testbed"),
        ({"role": "baseline", "kernel": "peer/humming_bf16"}, "of the role peer"),
    ],
)
def test_a_wrong_cell_that_claims_more_is_refused(changes, says) -> None:
    with pytest.raises(CampaignError, match=says):
        variant(**changes)


@pytest.mark.parametrize(
    "kernel",
    ["cublaslt_fp8", "testbed/full", "testbed/-weight_load-matrix_issue", "cause/warps/2x2",
     "cause/split_k/4", "probe/launch_floor", "peer/humming_fp8"],
)  # fmt: skip
def test_kernel_ids(kernel) -> None:
    assert rows.KERNEL_ID.fullmatch(kernel)


@pytest.mark.parametrize(
    "kernel",
    ["testbed", "testbed/", "cause/warps", "other/full", "Testbed/full", "peer/a/b", "a b"],
)
def test_what_is_no_kernel_id_is_refused(kernel) -> None:
    if kernel == "testbed":
        with pytest.raises(CampaignError, match="of the role testbed"):
            recorded.cell(kernel, "testbed")
    else:
        with pytest.raises(CampaignError, match="no kernel id"):
            recorded.cell(kernel, "testbed")
        with pytest.raises(CampaignError, match="no kernel id"):
            rows.CheckRow(kernel, "mxfp4", "q_o_proj", 1, 1, 1, "random_fp64", True)


def test_a_point_takes_legs_of_a_wrong_cell_without_a_check() -> None:
    assert check_point(**{k: v for k, v in point().items() if k != "telemetry"}) == []


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"role": "baseline"}, "of the role baseline, not testbed"),
        ({"correctness": "failed"}, "no check of it did"),
        ({"correctness": "passed"}, "passed without a check"),
        ({"correctness": "not_applicable"}, "correctness is not passed"),
    ],
)
def test_impossible_legs_of_a_variant_are_refused(tmp_path, kwargs, says) -> None:
    partial = records.PartialCampaign.open(tmp_path, recorded.header(rung="R1"))
    with pytest.raises(CampaignError, match=says):
        partial.append_point("q_o_proj/M1", **point(**kwargs))


def test_a_check_that_fails_cannot_be_by_design() -> None:
    made = point()
    checks = [*made["checks"], recorded.check(made["cells"][2], "bytes_read", passed=False)]
    (problem,) = check_point(made["cells"], checks, made["samples"])
    assert "what it does check failed" in problem


def test_it_gets_no_time_and_no_floor_and_is_in_no_table(tmp_path) -> None:
    folder = finished(tmp_path)
    assert records.verify(folder) == []
    campaign = records.load(folder)
    (wrong,) = (c for c in campaign.cells if c.correctness == WRONG)
    assert wrong.time is None and wrong.floor is None
    assert VARIANT in set(campaign.samples["kernel"])
    (full,) = (c for c in campaign.cells if c.role == "baseline")
    assert full.time is not None and full.floor is not None
    table = cells.table([folder])
    assert set(table["kernel"]) == {"stream_read", "cublaslt_fp8"}
    assert WRONG not in set(table["correctness"])


def test_a_time_that_is_written_into_the_record_is_seen(tmp_path) -> None:
    made = point()
    timed = records.fill_times(made["cells"], made["samples"])
    assert [c.time is None for c in timed] == [False, False, True]
    value = rows.to_json(timed[2]) | {"time": rows.to_json(timed[1])["time"]}
    with pytest.raises(CampaignError, match="has a time"):
        rows.CellRow.from_json(value)
    whole = records.load(finished(tmp_path)).to_json()
    assert schema.campaign_problems(whole) == []
    for change in ({"time": value["time"]}, {"floor": rows.to_json(timed[1])["floor"]}):
        cell = whole["cells"][2] | change
        assert schema.campaign_problems({**whole, "cells": [cell]})
    cell = whole["cells"][2] | {"role": "baseline"}
    assert schema.campaign_problems({**whole, "cells": [cell]})


def test_a_made_up_role_among_the_samples_is_refused() -> None:
    made = point()
    samples = made["samples"]
    samples.loc[samples["kernel"] == VARIANT, "role"] = "product"
    assert isinstance(samples, pd.DataFrame)
    assert any("product" in p for p in check_point(made["cells"], made["checks"], samples))
