"""Which campaign feeds a rung: measure a new one on this machine, or replay a recorded one.

Decided once, when Snakemake reads the Snakefile; so it is cheap, imports no CUDA binding and touches no device beyond
asking NVML for its UUID.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonschema import Draft202012Validator

from lab import device, files, seal

CAMPAIGNS = Path("data", "campaigns")
# What the cubins are made of: the sources, their sidecars and the module that holds the compiler's flags.
KERNEL_SOURCES = ("qgemm_mx/cuda/*", "qgemm_mx/build.py")
#: Rungs, and parts of one (lab.rungs), that a rule measures, with the target that asks for each.
MEASURED = {
    "R0": "r0_instrument",
    "R1": "r1_decomposition",
    "R2": "r2_kernel",
    "R2b": "r2_kernel",
}
POINTERS = ".work"  # <rung>/campaign.json below it names the campaign of a rung
#: Environment variable in which the main process leaves `asked_rungs`, with commas, to the jobs' own processes.
ASKED_VARIABLE = "QGEMM_MX_ASKED_RUNGS"
GPU_PACKAGES = ("cupy", "cuda.bindings", "nvmath")
INSTALL_GPU = "pip install -r requirements-gpu.txt"


class SelectError(RuntimeError):
    """What was asked for cannot be had on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Machine:
    """What this machine can measure with: device 0 (uuid None: there is none) and the GPU packages it lacks."""

    uuid: str | None
    capability: tuple[int, int] = (0, 0)
    missing: tuple[str, ...] = ()

    @property
    def architecture(self) -> str | None:
        """The architecture whose cubins run there: a cubin runs on its own major version, from its minor one upwards;
        one with an `a` on exactly its own. None when there is none.
        """
        major, minor = self.capability
        if (major, minor) == (9, 0):
            return "sm_90a"
        return "sm_86" if major == 8 and minor >= 6 else None

    @property
    def obstacle(self) -> str:
        """Why nothing can be measured here; empty when it can."""
        if self.uuid is None:
            return "no NVIDIA device here"
        if self.architecture is None:
            major, minor = self.capability
            return f"{self.uuid} has compute capability {major}.{minor}; kernels are built for 8.6 to 8.9 and 9.0"
        if self.missing:
            return f"{self.uuid} is here, but {', '.join(self.missing)} not: {INSTALL_GPU}"
        return ""


@dataclass(frozen=True)
class Recorded:
    """The few facts of a recorded campaign that choosing needs."""

    id: str
    rung: str
    kind: str
    created_utc: str
    device_name: str
    device_uuid: str
    kernels_digest: str | None


@dataclass(frozen=True)
class Plan:
    """What happens for a rung: `campaign` to replay, `architecture` to measure, and one line for the user."""

    action: Literal["measure", "replay", "nothing"]
    campaign: str | None
    say: str
    architecture: str | None = None


def plan(
    config: Mapping[str, Any], repo: str | Path, rung: str = "R0", machine: Machine | None = None
) -> Plan:
    """Decide between measuring and replaying from `measure` and `campaign` of the configuration.

    Raises SelectError when `measure: always` cannot be done, or the campaign asked for is not recorded.
    """
    mode = config["measure"]
    recorded = recorded_campaigns(repo, rung)
    wanted = _wanted(config["campaign"], recorded_campaigns(repo), rung)
    if mode == "never" or (mode == "auto" and wanted is not None):
        return _replay(
            wanted or _newest(recorded), rung, "measuring is off" if wanted is None else "as asked"
        )

    machine = machine or this_machine()
    if mode == "always":
        if wanted is not None:
            raise SelectError(
                f"measure=always makes a new campaign, campaign={wanted.id} replays a recorded one: give one of them"
            )
        if machine.obstacle:
            raise SelectError(f"measure=always, but {machine.obstacle}")
        return _measure(machine, rung)

    if machine.obstacle:
        return _replay(_newest(recorded), rung, machine.obstacle)
    digest = kernels_digest(repo)
    same = [c for c in recorded if c.device_uuid == machine.uuid and c.kernels_digest == digest]
    if same:
        why = "this device has measured these kernels already (--config measure=always measures again)"
        return _replay(_newest(same), rung, why)
    return _measure(machine, rung)


def plans(
    config: Mapping[str, Any],
    repo: str | Path,
    asked: Collection[str],
    machine: Machine | None = None,
) -> dict[str, Plan]:
    """The plan of every rung that has a measuring rule. Only rungs that were `asked` for are ever measured.

    The others are replayed, so that asking for one never measures another on the way. Raises SelectError as `plan`.
    """
    found = {}
    for rung in MEASURED:
        if rung in asked:
            found[rung] = plan(config, repo, rung, machine)
            continue
        wanted = _wanted(config["campaign"], recorded_campaigns(repo), rung)
        why = (
            "as asked" if wanted is not None else f"its target ({MEASURED[rung]}) was not asked for"
        )
        found[rung] = _replay(wanted or _newest(recorded_campaigns(repo, rung)), rung, why)
    return found


def asked_rungs(arguments: Iterable[str]) -> tuple[str, ...]:
    """What a command line asks for: by target, by measuring rule or by pointer; R0 without any of another rung."""
    given = set(arguments)

    def asks(rung: str) -> bool:
        low = rung.lower()
        return bool(given & {MEASURED[rung], f"measure_{low}", f"{POINTERS}/{low}/campaign.json"})

    return tuple(rung for rung in MEASURED if rung != "R0" and asks(rung)) or ("R0",)


def check_settings(config: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Refuse settings that `schema` (workflow/schemas/config.schema.json) does not allow. Raises SelectError."""
    known = schema["properties"]
    for name in sorted(set(config) ^ set(known)):
        if name in config:
            raise SelectError(f"{name} is not a setting; settings are {', '.join(known)}")
        raise SelectError(f"setting {name} is missing")
    for name, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SelectError(f"{name}={value} is no number. {known[name]['description']}")
        for error in Draft202012Validator(known[name]).iter_errors(value):
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            raise SelectError(f"{name}={shown}: {error.message}. {known[name]['description']}")


def campaign_to_pack(config: Mapping[str, Any], repo: str | Path) -> str:
    """Id of the campaign that was asked for, or else of the newest of all rungs.

    Raises SelectError when there is none, or nothing says where to pack it.
    """
    if config["archive"] is None:
        raise SelectError("say where to pack: --config archive=FILE.tar.gz")
    if config["campaign"] is not None:
        return config["campaign"]  # `plan` has looked for it
    if not (recorded := recorded_campaigns(repo)):
        raise SelectError(f"there is no campaign to pack in {CAMPAIGNS}")
    return recorded[-1].id


def archive_to_import(config: Mapping[str, Any]) -> str:
    """Path of the archive that was named. Raises SelectError when none was, or it is not there."""
    archive = config["archive"]
    if archive is None:
        raise SelectError("say what to import: --config archive=FILE.tar.gz")
    if not Path(archive).is_file():
        raise SelectError(f"archive={archive}: there is no such file")
    return archive


def recorded_campaigns(repo: str | Path, rung: str | None = None) -> list[Recorded]:
    """Recorded campaigns of a rung (None: of all), oldest first, without pilots and without `unreadable` ones.

    One whose bytes are not those of its sums and its name (lab.seal) is unreadable too.
    """
    found = [recorded for folder in _folders(repo) if (recorded := _read(folder)) is not None]
    wanted = [c for c in found if c.kind == "campaign" and rung in (None, c.rung)]
    return sorted(wanted, key=lambda c: (c.created_utc, c.id))


def unreadable(repo: str | Path) -> list[str]:
    """Folders of data/campaigns that are no readable campaign; the audit says what is wrong with them."""
    return [folder.name for folder in _folders(repo) if _read(folder) is None]


def _folders(repo: str | Path) -> list[Path]:
    # Names with a dot are campaigns that are being written or imported.
    return sorted(p for p in Path(repo, CAMPAIGNS).glob("*/") if p.is_dir() and p.name[0] != ".")


def _read(folder: Path) -> Recorded | None:
    if seal.problems(folder):
        return None
    try:
        campaign = files.read_json(folder / "campaign.json")
        return Recorded(
            id=folder.name,
            rung=campaign["rung"],
            kind=campaign["kind"],
            created_utc=campaign["created_utc"],
            device_name=campaign["device"]["name"],
            device_uuid=campaign["device"]["uuid"],
            kernels_digest=campaign["source"].get("kernels_digest"),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def kernels_digest(repo: str | Path) -> str:
    """SHA-256 of what the cubins are made of; a campaign records it as source.kernels_digest."""
    return files.digest(Path(repo, "kernels"), KERNEL_SOURCES)


def this_machine() -> Machine:
    """Device 0 of this machine, and the GPU packages that are not installed; none of them is imported to find out."""
    uuid = device.device_uuid()
    if uuid is None:
        return Machine(None)
    import pynvml

    capability = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    return Machine(uuid, tuple(capability), tuple(p for p in GPU_PACKAGES if not _installed(p)))


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def _wanted(campaign: str | None, recorded: list[Recorded], rung: str) -> Recorded | None:
    """The recorded campaign that was asked for, where it is one of this rung."""
    if campaign is None:
        return None
    for candidate in recorded:
        if candidate.id == campaign:
            return candidate if candidate.rung == rung else None
    known = ", ".join(c.id for c in recorded) or "none"
    raise SelectError(
        f"campaign={campaign} is not in {CAMPAIGNS}, or not usable (see the audit); recorded: {known}"
    )


def _newest(recorded: list[Recorded]) -> Recorded | None:
    return recorded[-1] if recorded else None


def _replay(campaign: Recorded | None, rung: str, why: str) -> Plan:
    if campaign is None:
        return Plan(
            "nothing", None, f"{rung}: {why}, and no campaign is recorded: the report says NOT_RUN"
        )
    what = f"{campaign.id} ({campaign.device_name}, {campaign.created_utc[:10]})"
    return Plan("replay", campaign.id, f"{rung}: replaying {what}: {why}")


def _measure(machine: Machine, rung: str) -> Plan:
    say = f"{rung}: measuring a new campaign on {machine.uuid}"
    return Plan("measure", None, say, machine.architecture)
