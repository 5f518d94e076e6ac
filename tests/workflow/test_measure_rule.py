"""What the workflow does on a machine with a GPU, tried without one: driver and harness are made up.

The harness itself is tested on a device. Here it is about when it is called, with what, and what becomes of its
campaign.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from lab import select

NVML = """
class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlDeviceGetCount():
    return 1

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlDeviceGetUUID(handle):
    return "GPU-made-up"

def nvmlDeviceGetCudaComputeCapability(handle):
    return (9, 0)
"""

# What both made-up harnesses write: a recorded campaign of these builds, as of a device that is here.
MADE_UP_CAMPAIGN = """
import datetime
import sys
from pathlib import Path


def made_up_campaign(repo, rung, builds):
    sys.path.insert(0, str(repo / "tests" / "lab"))
    import recorded
    from lab import select

    base = recorded.header()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    device = base["device"] | {"name": "NVIDIA H200", "uuid": "GPU-made-up"}
    source = base["source"] | {"kernels_digest": select.kernels_digest(repo)}
    cubins = [b.campaign_row() for b in builds]
    return recorded.campaign(
        repo, rung=rung, device=device, source=source, created_utc=now, cubins=cubins
    )
"""

HARNESS = """

def run_campaign(rung, repo, cubin_dir, builds, log):
    if (repo / "fail").exists():
        raise RuntimeError("the device fell off the bus")
    assert rung == "R0" and (cubin_dir / "stream_read.cubin").is_file()
    assert builds and {b.architecture for b in builds} == {cubin_dir.name} == {"sm_90a"}
    log("1 of 1 cells, 0 s left")
    return made_up_campaign(repo, "R0", builds)
"""


HARNESS_R2 = """

class Unfinished(RuntimeError):
    pass


def run_campaign_r2(repo, cubin_dir, builds, log, minutes):
    names = {b.name for b in builds}
    assert minutes == 5 and {b.architecture for b in builds} == {"sm_90a"}
    assert {"stream_read", "pack_gemv", "qgemv_made_up"} <= names and "testbed_made_up" not in names
    assert all((cubin_dir / f"{name}.cubin").is_file() for name in names)
    if not (repo / "piece_r2").exists():
        (repo / "piece_r2").touch()
        raise Unfinished("12 points of R2 are left: the same command goes on")
    return made_up_campaign(repo, "R2", builds)
"""
HARNESS_R2B = """

def run_campaign_r2b(repo, cubin_dir, builds, log, minutes, close):
    assert minutes == 5 and close is True and {"stream_read", "qgemv_made_up"} <= {b.name for b in builds}
    assert all((cubin_dir / f"{b.name}.cubin").is_file() for b in builds)
    return made_up_campaign(repo, "R2b", builds)
"""
HARNESS_R1 = """

class Unfinished(RuntimeError):
    pass


def run_campaign_r1(repo, cubin_dir, builds, log, minutes):
    assert minutes == 9 and (cubin_dir / "stream_read.cubin").is_file()
    assert (cubin_dir / "testbed_made_up.cubin").is_file() and {b.architecture for b in builds} == {"sm_90a"}
    assert {"stream_read", "testbed_made_up"} <= {b.name for b in builds}
    if not (repo / "piece").exists():
        (repo / "piece").touch()
        raise Unfinished("88 points of R1 are left: the same command goes on")
    return made_up_campaign(repo, "R1", builds)
"""
TESTBED = """
extern "C" __global__ void __launch_bounds__(32) testbed_made_up(int* out) { out[threadIdx.x] = 1; }
"""
SIDECAR = {
    "name": "testbed_made_up",
    "role": "testbed",
    "description": "made up",
    "architectures": ["sm_90a"],
    "threads": {"testbed_made_up": 32},
    "sass": {"sm_90a": {"require": ["STG"], "forbid": ["LDL"]}},
}


@dataclass(frozen=True)
class GpuMachine:
    """A checkout on a machine that says it has an H200."""

    checkout: object
    stubs: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = self.checkout.environment | {"PYTHONPATH": str(self.stubs)}
        return subprocess.run(
            self.checkout.command("--cores", "2", *arguments),
            cwd=self.checkout.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def campaigns(self) -> set[str]:
        return {c.id for c in select.recorded_campaigns(self.checkout.root)}


def stub(root: Path, packages: tuple[str, ...]) -> Path:
    root.mkdir()
    (root / "pynvml.py").write_text(NVML)
    for package in packages:
        folder = root / Path(*package.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    return root


@pytest.fixture(scope="module")
def machine(new_checkout) -> GpuMachine:
    """A GPU machine with everything installed and a campaign of somebody else recorded."""
    made = new_checkout(campaigns=False)
    made.record()
    (made.root / "workflow" / "lab" / "measure.py").write_text(MADE_UP_CAMPAIGN + HARNESS)
    return GpuMachine(made, stub(made.root.parent / "stubs", select.GPU_PACKAGES))


def test_auto_measures_once_and_then_replays(machine: GpuMachine) -> None:
    others = machine.campaigns()
    first = machine.run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "R0: measuring a new campaign on GPU-made-up" in first.stderr
    assert "1 of 1 cells, 0 s left" in first.stderr
    (mine,) = machine.campaigns() - others

    pointer = json.loads((machine.checkout.root / ".work/r0/campaign.json").read_text())
    assert pointer == {"campaign": mine}
    cells = pd.read_csv(machine.checkout.root / "reports" / "cells.csv")
    assert set(cells["campaign"]) == {mine}

    second = machine.run()
    assert second.returncode == 0, second.stdout + second.stderr
    assert (
        f"replaying {mine}" in second.stderr and "measured these kernels already" in second.stderr
    )
    assert machine.campaigns() == others | {mine}
    third = machine.run()
    assert "Nothing to be done" in third.stdout + third.stderr


def test_always_measures_again_and_keeps_what_was(machine: GpuMachine) -> None:
    before = machine.campaigns()
    kept = machine.checkout.snapshot("data")
    done = machine.run("r0_instrument", "--config", "measure=always")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(machine.campaigns() - before) == 1
    assert kept.items() <= machine.checkout.snapshot("data").items()


def test_other_kernels_are_measured_by_a_rule_that_holds_the_gpu(machine: GpuMachine) -> None:
    sidecar = machine.checkout.root / "kernels" / "qgemm_mx" / "cuda" / "stream_read.cu"
    text = sidecar.read_text()
    sidecar.write_text(text + "\n// changed\n")
    try:
        done = machine.run("-n", ".work/r0/campaign.json")
    finally:
        sidecar.write_text(text)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = done.stdout[done.stdout.index("Measuring R0") - 300 :]
    assert "R0: measuring" in done.stderr and "about 9 minutes" in planned
    rules = (machine.checkout.root / "workflow" / "rules" / "measure.smk").read_text()
    assert "gpu=1," in rules.split("rule select_r0")[0]


def test_a_failure_of_the_harness_is_one_sentence_and_records_nothing(machine: GpuMachine) -> None:
    before = machine.campaigns()
    (machine.checkout.root / "fail").touch()
    try:
        done = machine.run("--config", "measure=always")
    finally:
        (machine.checkout.root / "fail").unlink()
    assert done.returncode == 1
    assert "RuntimeError: the device fell off the bus" in done.stderr
    assert "Traceback" in (machine.checkout.root / ".work/logs/measure_r0.log").read_text()
    assert machine.campaigns() == before


@pytest.fixture(scope="module")
def r1_machine(machine: GpuMachine) -> GpuMachine:
    """The same with a small testbed and a made-up harness of R1."""
    root = machine.checkout.root
    (root / "workflow" / "lab" / "measure_r1.py").write_text(MADE_UP_CAMPAIGN + HARNESS_R1)
    cuda = root / "kernels" / "qgemm_mx" / "cuda"
    for path in (*cuda.glob("testbed*.cu"), *cuda.glob("testbed*.json")):
        path.unlink()
    (cuda / "testbed_made_up.cu").write_text(TESTBED)
    (cuda / "testbed_made_up.json").write_text(json.dumps(SIDECAR))
    return machine


POINTER = ".work/r1/campaign.json"


def test_r1_is_measured_when_its_target_asks_and_r0_is_not(r1_machine: GpuMachine) -> None:
    done = r1_machine.run("-n", "r1_decomposition")
    assert done.returncode == 0, done.stdout + done.stderr
    for rule in ("build_testbed", "measure_r1", "select_r0", "report"):
        assert rule in done.stdout
    assert "measure_r0" not in done.stdout and "R1: measuring a new campaign" in done.stderr
    plain = r1_machine.run("-n")
    for rule in ("build_testbed", "measure_r1", "select_r1"):
        assert rule not in plain.stdout
    assert "R1: " not in plain.stderr


def test_r1_is_taken_in_pieces_by_one_command_and_then_replayed(r1_machine: GpuMachine) -> None:
    root, before = r1_machine.checkout.root, r1_machine.campaigns()
    command = (POINTER, "reports/cells.csv", "--config", "minutes=9")
    first = r1_machine.run(*command)
    assert first.returncode == 1 and r1_machine.campaigns() == before
    assert "Unfinished: 88 points of R1 are left: the same command goes on" in first.stderr
    assert not (root / POINTER).exists()

    second = r1_machine.run(*command)
    assert second.returncode == 0, second.stdout + second.stderr
    (mine,) = r1_machine.campaigns() - before
    assert json.loads((root / POINTER).read_text()) == {"campaign": mine} and mine.startswith("r1-")
    shown = set(pd.read_csv(root / "reports" / "cells.csv")["campaign"])
    assert mine in shown and len(shown) == 2

    third = r1_machine.run(*command)
    assert third.returncode == 0 and f"R1: replaying {mine}" in third.stderr
    builds = json.loads((root / ".work/build/builds.json").read_text())
    assert "testbed_made_up" not in {b["name"] for b in builds}  # the report's tables leave it out
    assert r1_machine.campaigns() == before | {mine}


@pytest.fixture(scope="module")
def r2_machine(r1_machine: GpuMachine) -> GpuMachine:
    """The same with a small product and a made-up harness of R2."""
    root = r1_machine.checkout.root
    (root / "workflow" / "lab" / "measure_r2.py").write_text(MADE_UP_CAMPAIGN + HARNESS_R2)
    cuda = root / "kernels" / "qgemm_mx" / "cuda"
    for path in (*cuda.glob("qgem*.cu"), *cuda.glob("qgem*.json")):
        path.unlink()
    (cuda / "qgemv_made_up.cu").write_text(TESTBED.replace("testbed_made_up", "qgemv_made_up"))
    sidecar = SIDECAR | {"name": "qgemv_made_up", "role": "product"}
    sidecar["threads"] = {"qgemv_made_up": 32}
    (cuda / "qgemv_made_up.json").write_text(json.dumps(sidecar))
    return r1_machine


def test_r2_is_measured_in_pieces_when_its_target_asks_and_then_replayed(
    r2_machine: GpuMachine,
) -> None:
    root, before = r2_machine.checkout.root, r2_machine.campaigns()
    planned = r2_machine.run("-n", "r2_kernel")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    for rule in ("build_product", "measure_r2", "report"):
        assert rule in planned.stdout
    assert "measure_r0" not in planned.stdout and "measure_r1" not in planned.stdout
    assert "R2: measuring a new campaign" in planned.stderr

    command = (".work/r2/campaign.json", "reports/cells.csv", "--config", "minutes=5")
    first = r2_machine.run(*command)
    assert first.returncode == 1 and r2_machine.campaigns() == before
    assert "Unfinished: 12 points of R2 are left: the same command goes on" in first.stderr
    second = r2_machine.run(*command)
    assert second.returncode == 0, second.stdout + second.stderr
    (mine,) = r2_machine.campaigns() - before
    pointer = json.loads((root / ".work/r2/campaign.json").read_text())
    assert pointer == {"campaign": mine} and mine.startswith("r2-")
    assert mine in set(pd.read_csv(root / "reports" / "cells.csv")["campaign"])
    third = r2_machine.run(*command)
    assert third.returncode == 0 and f"R2: replaying {mine}" in third.stderr
    assert r2_machine.campaigns() == before | {mine}


def test_both_parts_of_r2_are_measured_by_its_target(r2_machine: GpuMachine) -> None:
    """The decode part is recorded by now: the other is measured alone, and neither in a plain run."""
    root, before = r2_machine.checkout.root, r2_machine.campaigns()
    harness = root / "workflow" / "lab" / "measure_r2b.py"
    harness.write_text(MADE_UP_CAMPAIGN + HARNESS_R2B)
    planned = r2_machine.run("-n", "r2_kernel")
    for rule in ("measure_r2b", "report"):
        assert rule in planned.stdout, planned.stdout + planned.stderr
    assert "measure_r2 " not in planned.stdout
    plain = r2_machine.run("-n")
    assert "measure_r2b" not in plain.stdout and "R2b: " not in plain.stderr

    command = (
        ".work/r2b/campaign.json",
        "reports/cells.csv",
        "--config",
        "minutes=5",
        "close=true",
    )
    done = r2_machine.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "R2b: measuring a new campaign" in done.stderr
    (mine,) = r2_machine.campaigns() - before
    assert mine.startswith("r2b-")
    assert json.loads((root / ".work/r2b/campaign.json").read_text()) == {"campaign": mine}
    shown = set(pd.read_csv(root / "reports" / "cells.csv")["campaign"])
    assert mine in shown and any(name.startswith("r2-") for name in shown)
    again = r2_machine.run("-n", "r2_kernel")
    assert f"R2b: replaying {mine}" in again.stderr and "measure_r2" not in again.stdout


def test_without_the_gpu_packages_it_replays_and_says_what_to_install(
    machine: GpuMachine, tmp_path: Path
) -> None:
    if select._installed("cupy"):
        pytest.skip("cupy is installed here")
    bare = GpuMachine(machine.checkout, stub(tmp_path / "stubs", ()))
    done = bare.run("-n")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("R0: ")]
    assert len(lines) == 1
    assert "replaying" in lines[0] and "pip install -r requirements-gpu.txt" in lines[0]
    refused = bare.run("-n", "--config", "measure=always")
    assert refused.returncode == 1
    assert "pip install -r requirements-gpu.txt" in refused.stdout + refused.stderr
