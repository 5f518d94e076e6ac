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

HARNESS = """
import datetime
import sys
from pathlib import Path


def run_campaign(rung, repo, cubin_dir, builds, log):
    if (repo / "fail").exists():
        raise RuntimeError("the device fell off the bus")
    assert rung == "R0" and (cubin_dir / "stream_read.cubin").is_file()
    assert builds and {b.architecture for b in builds} == {cubin_dir.name} == {"sm_90a"}
    log("1 of 1 cells, 0 s left")
    sys.path.insert(0, str(repo / "tests" / "lab"))
    import recorded
    from lab import select

    base = recorded.header()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    device = base["device"] | {"name": "NVIDIA H200", "uuid": "GPU-made-up"}
    source = base["source"] | {"kernels_digest": select.kernels_digest(repo)}
    cubins = [b.campaign_row() for b in builds]
    return recorded.campaign(repo, device=device, source=source, created_utc=now, cubins=cubins)
"""


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
    (made.root / "workflow" / "lab" / "measure.py").write_text(HARNESS)
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
