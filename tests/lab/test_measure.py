"""The measuring flow without a device: a made-up timer and made-up arms go through the real protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_arms import FakeArm, FakeTimer

from lab import measure
from lab.journal import check_point
from lab.samples import DUPLICATE_SUFFIX, block_times, cell_times

SHAPE = {"name": "q_o_proj", "N": 4096, "K": 4096}


@pytest.fixture
def protocol(repository) -> dict:
    return json.loads((repository / "prereg/protocol.json").read_text())


def bench(protocol: dict, noise: float = 0.003) -> Any:
    return SimpleNamespace(protocol=protocol, timer=FakeTimer(noise))


def arms() -> list[FakeArm]:
    return [
        FakeArm("stream_read", "bf16", "floor", 9.0),
        FakeArm("cublaslt_fp8", "fp8_e4m3", "baseline", 7.0),
        FakeArm("naive_dequant", "mxfp4", "sanity_floor", 24.0),
    ]


def test_a_point_gives_cells_checks_and_legs_that_the_journal_takes(protocol) -> None:
    cells, checks, samples = measure.measure_point(bench(protocol), arms(), SHAPE, 16, [])
    assert check_point(cells, checks, samples) == []
    assert {c.regime for c in cells} == {"cold_graph", "hot_graph", "cold_loop"}
    times = {
        key[0]: time.time_us for key, time in cell_times(samples).items() if key[-1] == "cold_graph"
    }
    assert times == pytest.approx(
        {"stream_read": 9, "cublaslt_fp8": 7, "naive_dequant": 24}, rel=0.01
    )


def test_the_frozen_number_of_blocks_and_an_a_a_leg(protocol) -> None:
    _, _, samples = measure.measure_point(bench(protocol), arms(), SHAPE, 16, [])
    cold = samples[samples.regime == "cold_graph"]
    assert cold.block.nunique() == protocol["blocks"]["small_m"]
    assert not cold.extension.any()
    twins = block_times(cold)
    assert set(twins.arm) >= {"cublaslt_fp8/fp8_e4m3", "cublaslt_fp8/fp8_e4m3" + DUPLICATE_SUFFIX}
    assert (cold.groupby(["block", "arm"]).size() == 2).all()


def test_large_m_takes_fewer_blocks_and_times_the_naive_path_in_the_headline_only(protocol) -> None:
    cells, _, samples = measure.measure_point(bench(protocol), arms(), SHAPE, 1024, [])
    assert samples[samples.regime == "cold_graph"].block.nunique() == protocol["blocks"]["large_m"]
    assert {c.regime for c in cells if c.kernel == "naive_dequant"} == {"cold_graph"}


def test_wide_intervals_extend_once(protocol) -> None:
    _, _, samples = measure.measure_point(bench(protocol, noise=0.2), arms(), SHAPE, 16, [])
    cold = samples[samples.regime == "cold_graph"]
    assert cold.block.nunique() == 2 * protocol["blocks"]["small_m"]
    assert cold.extension.mean() == 0.5


@pytest.mark.parametrize("stage", ["before", "after"])
def test_an_arm_that_is_wrong_has_checks_and_no_time(protocol, stage) -> None:
    wrong = FakeArm("cublaslt_bf16", "bf16", "baseline", 12.0, broken=stage)
    cells, checks, samples = measure.measure_point(bench(protocol), [*arms(), wrong], SHAPE, 16, [])
    assert check_point(cells, checks, samples) == []
    assert {c.correctness for c in cells if c.kernel == "cublaslt_bf16"} == {"failed"}
    assert "cublaslt_bf16" not in set(samples.kernel)
    assert any(not c.passed for c in checks if c.kernel == "cublaslt_bf16")


def test_the_recheck_looks_at_the_copy_of_the_last_call(protocol) -> None:
    arm = FakeArm("cublaslt_fp8", "fp8_e4m3", "baseline", 7.0, copies=5)
    measure.measure_point(bench(protocol), [arm], SHAPE, 16, [])
    last = (protocol["graph"]["min_nodes"] - 1) % 5  # the last regime is the loop
    assert arm.checked == [(0, "before"), (last, "after")]


def test_a_throttled_leg_drops_its_block(protocol) -> None:
    hot = [{"t_ns": 5_000_000, "throttle_reasons": 0x40}]
    assert measure.drop_reason(protocol, hot, 4_900_000, 5_100_000) == "hw_thermal_slowdown"
    capped = [{"t_ns": 5_000_000, "throttle_reasons": 0x4}]
    assert measure.drop_reason(protocol, capped, 4_900_000, 5_100_000) is None
    assert measure.drop_reason(protocol, hot, 10**9, 10**9 + 1) is None


def test_formats_of_a_shape_without_int4_g128() -> None:
    assert "int4_g64" in measure.formats_of({"K": 2880})
    assert "int4_g128" in measure.formats_of({"K": 4096})


def test_points_and_blocks_are_ordered_by_the_frozen_seed(protocol) -> None:
    seed = measure.point_seed(protocol, "shapes")
    assert seed == measure.point_seed(protocol, "shapes") != measure.point_seed(protocol, "other")
    assert sorted(measure.shuffled([3, 1, 2], seed)) == [1, 2, 3]


@pytest.mark.parametrize("path", ["prereg/claims/r0.json", "prereg/forecasts/r0.json"])
def test_a_measuring_process_cannot_open_a_prediction(repository, path) -> None:
    def opening(file: str) -> subprocess.CompletedProcess[str]:
        program = (
            "from lab import bench, measure; bench.forbid_predictions();"
            f" print(len(open({str(repository / file)!r}).read()))"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    refused = opening(path)
    assert refused.returncode and "must not read predictions" in refused.stderr
    assert opening("prereg/protocol.json").returncode == 0
