"""What would run, and what is refused before anything runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lab import rungs, select

RUN_RULES = {
    "build_cubins", "check_sass", "occupancy", "select_r0", "cells", "verdicts", "analysis_r1", "analysis_r2",
    "analysis_r2b", "figures", "report",
}  # fmt: skip
NO_DEVICE = select.this_machine().uuid is None


def planned(text: str) -> set[str]:
    """Rules in the table of a dry run."""
    table = text.split("Job stats:")[1].split("total")[0]
    return {line.split()[0] for line in table.splitlines() if re.match(r"\w+ +\d+$", line.strip())}


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The sentence that a refused run ends with, after nothing that looks like a traceback."""
    assert done.returncode == 1
    assert not re.search(r"Traceback|Exception|WorkflowError|line \d+", done.stdout + done.stderr)
    last = done.stderr.rstrip("\n").splitlines()[-1]
    assert last.startswith("Error: ") and done.stderr.count("Error") == 1
    return last


def test_default_target_is_the_report(checkout) -> None:
    done = checkout.ok("-n", "--forceall", "--config", "measure=never")
    assert planned(done.stdout + done.stderr) == RUN_RULES | {"default"}


@pytest.mark.parametrize(
    ("target", "some"),
    [
        ("all", {"report", "occupancy"}),
        ("build", {"build_cubins", "check_sass", "occupancy"}),
        ("r0_instrument", {"select_r0", "cells", "check_sass"}),
        ("audit", {"audit"}),
    ],
)
def test_targets(checkout, target: str, some: set[str]) -> None:
    done = checkout.ok("-n", "--forceall", target, "--config", "measure=never")
    assert some <= planned(done.stdout + done.stderr)


def test_null_on_the_command_line_is_no_text(checkout) -> None:
    """A setting whose help names null takes it there too; another refuses it by name."""
    checkout.ok("-n", "--config", "measure=never", "minutes=null", "campaign=null", "archive=null")
    assert "audit=None" in refusal(checkout.run("-n", "--config", "audit=null"))


def test_building_does_not_judge(checkout) -> None:
    done = checkout.ok("-n", "--forceall", "build")
    assert not planned(done.stdout + done.stderr) & {"verdicts", "report", "audit"}


def test_two_measurements_never_share_a_device(checkout) -> None:
    """The default profile's limit holds in a plain run; the command line's wins."""
    plain = checkout.ok("--cores", "2", "--force", "cells", "--config", "measure=never")
    assert re.search(r"Provided resources: gpu=\D*1\b", plain.stderr)
    wider = checkout.ok(
        "--cores", "2", "--resources", "gpu=2", "--force", "cells", "--config", "measure=never"
    )
    assert re.search(r"Provided resources: gpu=\D*2\b", wider.stderr)


def test_the_profile_can_be_named(checkout) -> None:
    checkout.ok("-n", "--forceall", "--workflow-profile", "workflow/profiles/default")


@pytest.mark.parametrize("rung", rungs.RUNGS[1:], ids=lambda r: r.id)
def test_a_rung_that_is_not_measured_says_what_is_missing(checkout, rung: rungs.Rung) -> None:
    lacking = rungs.missing(rung.id, checkout.root)
    if not lacking:
        pytest.skip(f"{rung.id} is measured")
    done = checkout.run("--cores", "1", rung.target)
    sentence = refusal(done)
    assert f"{rung.id} has not been measured" in sentence
    for what in lacking:
        assert what in sentence


@pytest.mark.skipif(not NO_DEVICE, reason="there is a device here: measuring would start")
def test_measure_always_without_a_device_is_an_error(checkout) -> None:
    done = checkout.run("--cores", "1", "--config", "measure=always")
    assert refusal(done) == "Error: measure=always, but no NVIDIA device here"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("pack_campaign",), "archive=FILE.tar.gz"),
        (("import_campaign",), "archive=FILE.tar.gz"),
        (("import_campaign", "--config", "archive=no.tar.gz"), "archive=no.tar.gz: there is no"),
        (
            (
                "pack_campaign",
                "--config",
                "archive=a.tar.gz",
                "campaign=r1-x-20260101-0123456789ab",
            ),
            "campaign=r1-x-20260101-0123456789ab is not in data/campaigns",
        ),
        (("build", "--config", "architectures=sm_90"), "architectures=sm_90: 'sm_90' is not one"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    checkout, command: tuple[str, ...], words: str
) -> None:
    assert words in refusal(checkout.run("--cores", "1", *command))
    assert not (checkout.root / "a.tar.gz").exists()


def test_one_architecture_can_be_typed_without_brackets(checkout) -> None:
    checkout.ok("-n", "build", "--config", "architectures=sm_86")


def test_a_campaign_is_packed_out_of_the_way_of_git_and_imported_once(checkout) -> None:
    (packed,) = (path.name for path in (checkout.root / "data" / "campaigns").iterdir())
    before = checkout.snapshot("data")
    archive = ("--config", "archive=campaign.tar.gz")
    checkout.ok("--cores", "1", "pack_campaign", *archive, f"campaign={packed}")
    checkout.git("check-ignore", "campaign.tar.gz")
    done = checkout.ok("--cores", "1", "import_campaign", *archive)
    assert f"data/campaigns/{packed}: already here, identical" in done.stderr
    assert checkout.snapshot("data") == before
    (checkout.root / "campaign.tar.gz").unlink()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("measure=sometimes", ("sometimes", "measure", "auto")),
        ("meassure=never", ("meassure",)),
        ("campaign=../elsewhere", ("elsewhere",)),
    ],
)
def test_a_wrong_setting_is_refused_by_name(checkout, setting: str, words: tuple[str, ...]) -> None:
    done = checkout.run("-n", "--config", setting)
    assert done.returncode == 1
    for word in words:
        assert word in done.stdout + done.stderr


def test_every_setting_is_described(repository: Path) -> None:
    import json

    import yaml

    schema = json.loads((repository / "workflow/schemas/config.schema.json").read_text())
    settings = yaml.safe_load((repository / "workflow/config.yaml").read_text())
    assert schema["additionalProperties"] is False
    assert set(settings) == set(schema["properties"]) == set(schema["required"])
    assert all(p["description"] for p in schema["properties"].values())
