"""measure: auto | always | never, decided on made-up machines and made-up recorded campaigns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import seal, select
from lab.select import Machine, Plan, SelectError, plan

CONFIG = {
    "measure": "auto",
    "campaign": None,
    "archive": None,
    "architectures": ["sm_90a"],
    "minutes": None,
    "close": False,
}
NO_GPU = Machine(None)
H200 = Machine("GPU-1", (9, 0))
BARE_H200 = Machine("GPU-1", (9, 0), ("cupy", "cuda.bindings"))
OTHER = Machine("GPU-2", (8, 9))


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    cuda = tmp_path / "kernels" / "qgemm_mx" / "cuda"
    cuda.mkdir(parents=True)
    (cuda / "a.cu").write_text("a")
    return tmp_path


def record(
    repo: Path, day: int, uuid: str = "GPU-1", kind: str = "campaign", rung: str = "R0", **source
) -> str:
    """Write the few facts of a campaign that choosing reads."""
    folder = repo / "data" / "campaigns" / f".{day}"
    folder.mkdir(parents=True)
    source.setdefault("kernels_digest", select.kernels_digest(repo))
    value = {
        "rung": rung,
        "kind": kind,
        "created_utc": f"2026-11-{day:02d}T00:00:00Z",
        "device": {"name": "NVIDIA H200", "uuid": uuid},
        "source": source,
    }
    (folder / "campaign.json").write_text(json.dumps(value))
    for table in (seal.SAMPLES, seal.TELEMETRY):
        (folder / table).touch()
    sums = {name: seal.sha256(folder / name) for name in seal.HASHED}
    (folder / seal.SUMS).write_text(json.dumps(sums))
    return folder.rename(folder.parent / seal.campaign_id(value, sums)).name


def decide(repo: Path, machine: Machine, **config) -> Plan:
    return plan(CONFIG | config, repo, "R0", machine)


def test_nothing_recorded_and_no_device(repo: Path) -> None:
    decided = decide(repo, NO_GPU)
    assert (decided.action, decided.campaign) == ("nothing", None)
    assert "NOT_RUN" in decided.say


def test_no_device_replays_the_newest_and_says_so_in_one_line(repo: Path) -> None:
    newest = record(repo, 20)
    record(repo, 3)
    decided = decide(repo, NO_GPU)
    assert (decided.action, decided.campaign) == ("replay", newest)
    assert newest in decided.say and "no NVIDIA device" in decided.say and "\n" not in decided.say


def test_device_without_packages_replays_and_says_what_to_install(repo: Path) -> None:
    newest = record(repo, 20, uuid="GPU-9")
    decided = decide(repo, BARE_H200)
    assert (decided.action, decided.campaign) == ("replay", newest)
    assert "cupy, cuda.bindings" in decided.say and "requirements-gpu.txt" in decided.say
    assert "\n" not in decided.say


def test_device_that_measured_these_kernels_is_replayed(repo: Path) -> None:
    mine = record(repo, 3)
    record(repo, 20, uuid="GPU-9")
    assert decide(repo, H200).campaign == mine


def test_another_device_measures(repo: Path) -> None:
    record(repo, 3)
    assert decide(repo, OTHER).action == "measure"


def test_other_kernels_measure(repo: Path) -> None:
    record(repo, 3)
    (repo / "kernels" / "qgemm_mx" / "cuda" / "a.cu").write_text("b")
    assert decide(repo, H200).action == "measure"


def test_a_campaign_without_kernels_digest_is_not_taken_for_these_kernels(repo: Path) -> None:
    record(repo, 3, kernels_digest=None)
    assert decide(repo, H200).action == "measure"


def test_pilots_and_other_rungs_are_not_replayed(repo: Path) -> None:
    record(repo, 20, kind="pilot")
    record(repo, 21, rung="R1")
    assert decide(repo, NO_GPU).action == "nothing"


def test_never_replays_even_with_a_device(repo: Path) -> None:
    record(repo, 3, uuid="GPU-9")
    assert decide(repo, H200, measure="never").action == "replay"


def test_always_measures_even_when_recorded(repo: Path) -> None:
    record(repo, 3)
    assert decide(repo, H200, measure="always").action == "measure"


@pytest.mark.parametrize(
    ("machine", "word"), [(NO_GPU, "no NVIDIA device"), (BARE_H200, "requirements-gpu.txt")]
)
def test_always_fails_where_nothing_can_be_measured(
    repo: Path, machine: Machine, word: str
) -> None:
    record(repo, 3)
    with pytest.raises(SelectError, match=word):
        decide(repo, machine, measure="always")


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((9, 0), "sm_90a"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_86"),
        ((8, 0), None),
        ((10, 0), None),
        ((7, 5), None),
    ],
)
def test_architecture_of_a_device(
    repo: Path, capability: tuple[int, int], architecture: str | None
) -> None:
    machine = Machine("GPU-1", capability)
    assert machine.architecture == architecture
    decided = decide(repo, machine)
    assert decided.action == ("measure" if architecture else "nothing")
    assert decided.architecture == architecture
    assert architecture or f"{capability[0]}.{capability[1]}" in decided.say


def test_a_campaign_asked_for_is_replayed(repo: Path) -> None:
    old = record(repo, 3)
    record(repo, 20)
    assert decide(repo, OTHER, campaign=old) == decide(repo, NO_GPU, campaign=old, measure="never")
    assert decide(repo, OTHER, campaign=old).campaign == old


def test_a_campaign_whose_bytes_changed_is_never_chosen(repo: Path) -> None:
    old, new = record(repo, 3), record(repo, 20)
    with (repo / "data" / "campaigns" / new / "campaign.json").open("a") as file:
        file.write(" ")
    assert decide(repo, NO_GPU).campaign == old
    assert select.unreadable(repo) == [new]
    with pytest.raises(SelectError, match="see the audit"):
        decide(repo, NO_GPU, campaign=new)


def test_a_campaign_that_is_not_recorded_is_an_error_that_lists_those_that_are(repo: Path) -> None:
    known = record(repo, 3)
    with pytest.raises(SelectError, match=known):
        decide(repo, NO_GPU, campaign="r0-h200-20261101-0123456789ab")


def test_always_and_a_campaign_contradict_each_other(repo: Path) -> None:
    with pytest.raises(SelectError, match="one of them"):
        decide(repo, H200, campaign=record(repo, 3), measure="always")


def test_only_the_rung_asked_for_is_measured(repo: Path) -> None:
    """Another device and other kernels: R0 would be measured, were it not for the target of R1."""
    old = record(repo, 3, uuid="GPU-9")
    first = select.plans(CONFIG, repo, ["R0"], H200)
    assert (first["R0"].action, first["R1"].action) == ("measure", "nothing")
    second = select.plans(CONFIG, repo, ["R1"], H200)
    assert (second["R0"].action, second["R0"].campaign) == ("replay", old)
    assert (second["R1"].action, second["R1"].architecture) == ("measure", "sm_90a")
    assert "r0_instrument" in second["R0"].say and "R1: measuring" in second["R1"].say
    assert {r: p.action for r, p in select.plans(CONFIG, repo, ["R1"], NO_GPU).items()} == {
        "R0": "replay", "R1": "nothing", "R2": "nothing", "R2b": "nothing",
    }  # fmt: skip


def test_both_parts_of_r2_are_measured_by_its_target_and_each_is_replayed_by_itself(
    repo: Path,
) -> None:
    """A part that this device has measured with these kernels is not measured again beside the other."""
    decode = record(repo, 4, rung="R2")
    asked = select.asked_rungs(["--cores", "1", "r2_kernel"])
    found = select.plans(CONFIG, repo, asked, H200)
    assert (found["R2"].action, found["R2"].campaign) == ("replay", decode)
    assert found["R2b"].action == "measure" and "R2b: measuring" in found["R2b"].say
    prefill = record(repo, 5, rung="R2b")
    assert prefill.startswith("r2b-")
    again = record(repo, 6, rung="R2")
    found = select.plans(CONFIG, repo, asked, NO_GPU)
    assert (found["R2"].campaign, found["R2b"].campaign) == (again, prefill)  # each its newest
    older = select.plans(CONFIG | {"campaign": decode}, repo, asked, NO_GPU)
    assert (older["R2"].campaign, older["R2b"].campaign) == (decode, prefill)


def test_a_recorded_r1_campaign_is_replayed_whatever_is_asked(repo: Path) -> None:
    mine = record(repo, 4, rung="R1")
    for asked in select.MEASURED:
        assert select.plans(CONFIG, repo, [asked], NO_GPU)["R1"].campaign == mine
    always = CONFIG | {"measure": "always"}
    assert select.plans(always, repo, ["R0"], H200)["R1"].campaign == mine
    assert select.plans(always, repo, ["R1"], H200)["R1"].action == "measure"
    newer = record(repo, 5, rung="R1")
    assert select.plans(CONFIG | {"campaign": mine}, repo, ["R0"], NO_GPU)["R1"].campaign == mine
    assert select.plans(CONFIG, repo, ["R0"], NO_GPU)["R1"].campaign == newer


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("-n --cores 2", "R0"),
        ("--cores 1 r1_decomposition", "R1"),
        ("-n .work/r1/campaign.json --config minutes=9", "R1"),
        ("--force measure_r1", "R1"),
        ("--cores 1 r2_kernel --config minutes=5", "R2 R2b"),
        (".work/r2/campaign.json", "R2"),
        (".work/r2b/campaign.json --config minutes=9", "R2b"),
        ("r1_decomposition measure_r2b", "R1 R2b"),
        ("r0_instrument", "R0"),
        ("audit", "R0"),
    ],
)
def test_a_command_line_asks_for_rungs(line: str, asked: str) -> None:
    assert select.asked_rungs(line.split()) == tuple(asked.split())


def test_deciding_imports_no_cuda_binding(repo: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from lab import select; select.this_machine(); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('cupy', 'nvmath') or m == 'cuda.bindings'))"
    )
    env = {"PYTHONPATH": f"{Path(select.__file__).parents[1]}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_campaign_of_another_rung_leaves_this_one_its_newest(repo: Path) -> None:
    newest = record(repo, 3)
    other = record(repo, 4, rung="R1")
    assert decide(repo, NO_GPU, campaign=other).campaign == newest
    with pytest.raises(SelectError, match="is not in data/campaigns"):
        decide(repo, NO_GPU, campaign="r1-h200-20261101-0123456789ab")


def test_the_campaign_asked_for_is_packed_or_else_the_newest_of_all_rungs(repo: Path) -> None:
    asked = CONFIG | {"archive": "a.tar.gz"}
    with pytest.raises(SelectError, match="no campaign to pack"):
        select.campaign_to_pack(asked, repo)
    old, newest = record(repo, 3), record(repo, 4, rung="R1")
    record(repo, 5, kind="pilot")
    assert select.campaign_to_pack(asked, repo) == newest
    assert select.campaign_to_pack(asked | {"campaign": old}, repo) == old
    with pytest.raises(SelectError, match="archive=FILE"):
        select.campaign_to_pack(CONFIG, repo)


def test_the_archive_to_import_has_to_be_there(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with pytest.raises(SelectError, match="archive=FILE"):
        select.archive_to_import(CONFIG)
    with pytest.raises(SelectError, match=r"a\.tar\.gz: there is no such file"):
        select.archive_to_import(CONFIG | {"archive": str(archive)})
    archive.touch()
    assert select.archive_to_import(CONFIG | {"archive": str(archive)}) == str(archive)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["sm_90"]}, "architectures=sm_90: 'sm_90' is not one of"),
        ({"measure": "sometimes"}, "measure=sometimes: 'sometimes' is not one of"),
        ({"meassure": "never"}, "meassure is not a setting; settings are measure, campaign"),
        ({"campaign": "r0"}, "campaign=r0: "),
        ({"minutes": 0}, "minutes=0: 0 is less than or equal to the minimum"),
        ({"minutes": -1}, "minutes=-1: -1 is less than or equal to the minimum"),
        ({"minutes": "abc"}, "minutes=abc: 'abc' is not of type 'number'"),
        ({"close": "yes"}, "close=yes: 'yes' is not of type 'boolean'"),
        ({"minutes": float("nan")}, "minutes=nan is no number"),
        ({"minutes": float("inf")}, "minutes=inf is no number"),
    ],
)
def test_a_wrong_setting_is_one_sentence(repository: Path, change: dict, words: str) -> None:
    schema = json.loads((repository / "workflow/schemas/config.schema.json").read_text())
    sound = CONFIG | {"audit": "short"}
    select.check_settings(sound, schema)
    with pytest.raises(SelectError) as refused:
        select.check_settings(sound | change, schema)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(SelectError, match="setting audit is missing"):
        select.check_settings(CONFIG, schema)
