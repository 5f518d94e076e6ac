"""The rows of a campaign. A row that cannot be true is refused when it is made, so no later reader has to doubt one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KINDS = ("campaign", "pilot")
REGIMES = ("cold_graph", "hot_graph", "cold_loop", "chain_pdl")
ROLES = ("floor", "baseline", "sanity_floor", "correctness_only", "peer", "testbed", "product")
INVALID_BY_DESIGN = "invalid_by_design"
CORRECTNESS = ("passed", "failed", "not_applicable", INVALID_BY_DESIGN)
STATUSES = ("ok", "failed", "crashed", "interrupted", "refused")

# The one kernel that must never be cited as a performance result, whatever role a caller claims for it.
CORRECTNESS_ONLY_KERNEL = "reference"

# One word, or a family with what tells its members apart: testbed/<variant>, cause/<experiment>/<value>, probe/<name>,
# peer/<name>, qgemv_mx/<mode>, qgemm_mx/<mode>. A variant's name lists what was removed, so it may begin with a dash.
KERNEL_ID = re.compile(
    r"[a-z][a-z0-9_]*|(testbed|probe|peer|qgemv_mx|qgemm_mx)/[a-z0-9_-]+|cause/[a-z0-9_]+/[a-z0-9_.-]+"
)
#: Kernels of the role `testbed`: the testbed, and the steps and elements of the product's ablation, which are right.
#: Only kernels of this role can be wrong by design.
TESTBED_FAMILIES = (
    "testbed/", "cause/", "probe/", "qgemv_mx/step", "qgemv_mx/-", "qgemm_mx/step", "qgemm_mx/-",
)  # fmt: skip
PEER_FAMILY = "peer/"

CellKey = tuple[str, str, str, int, int, int, str]
KEY_COLUMNS = ("kernel", "format", "shape", "N", "K", "M", "regime")


class CampaignError(Exception):
    """A campaign, or a part of one, that is not what it must be; the message names the object and the value."""


def utc_pattern(text: Any) -> bool:
    """Whether `text` is a UTC time such as 2026-11-30T12:00:00Z."""
    return isinstance(text, str) and bool(
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", text)
    )


@dataclass(frozen=True)
class Interval:
    """A time with its 95% interval, microseconds."""

    time_us: float
    ci_low_us: float
    ci_high_us: float

    def __post_init__(self) -> None:
        for name in ("time_us", "ci_low_us", "ci_high_us"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value <= 0
            ):
                raise CampaignError(f"{name}={value!r} is not a finite time above 0")
        if not self.ci_low_us <= self.time_us <= self.ci_high_us:
            raise CampaignError(
                f"time_us={self.time_us} is outside its interval [{self.ci_low_us}, {self.ci_high_us}]"
            )


@dataclass(frozen=True)
class CellTime(Interval):
    """The time of a cell: t interval over the log times of `n_blocks` blocks, exponentiated."""

    n_blocks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.n_blocks) is not int or self.n_blocks < 2:
            raise CampaignError(f"n_blocks={self.n_blocks!r}: an interval needs at least 2 blocks")


@dataclass(frozen=True)
class Tuning:
    """How many candidates were tried, the one that was taken, and the time of the heuristic's first over its time."""

    candidates: int
    chosen: str
    heuristic_first_over_best: float | None = None

    def __post_init__(self) -> None:
        gain = self.heuristic_first_over_best
        if gain is not None and not (math.isfinite(gain) and gain > 0):
            raise CampaignError(f"tuning: heuristic_first_over_best={gain!r} is not a ratio")
        if (
            type(self.candidates) is not int
            or self.candidates < 1
            or not isinstance(self.chosen, str)
        ):
            raise CampaignError(
                f"tuning of {self.candidates!r} candidates, chosen {self.chosen!r}, is none"
            )


@dataclass(frozen=True)
class CellRow:
    """One cell of a campaign. The harness leaves `time` and `floor` empty: `finalise` takes both from the samples.

    A cell that is `invalid_by_design` (a testbed variant with a part left out) never has a time or a floor: its legs
    serve the decomposition alone.
    """

    kernel: str
    role: str
    format: str
    shape: str
    N: int
    K: int
    M: int
    regime: str
    weight_bytes: int
    correctness: str
    tuning: Tuning | None = None
    time: CellTime | None = None
    floor: Interval | None = None

    def __post_init__(self) -> None:
        _problem(self)
        _one_of(self, "role", ROLES)
        _one_of(self, "regime", REGIMES)
        _one_of(self, "correctness", CORRECTNESS)
        if type(self.weight_bytes) is not int or self.weight_bytes <= 0:
            raise CampaignError(f"{self}: weight_bytes={self.weight_bytes!r} is not above 0")
        if (self.kernel == CORRECTNESS_ONLY_KERNEL) != (self.role == "correctness_only"):
            raise CampaignError(
                f"{self}: role {self.role!r}; the kernel {CORRECTNESS_ONLY_KERNEL!r}, and only it, is correctness_only"
            )
        family = {"testbed": TESTBED_FAMILIES, "peer": (PEER_FAMILY,)}
        for role, prefixes in family.items():
            if (self.role == role) != self.kernel.startswith(prefixes):
                raise CampaignError(
                    f"{self}: role {self.role!r}; kernels {', '.join(p + '...' for p in prefixes)}, and only they, are"
                    f" of the role {role}"
                )
        for name, kind in (("tuning", Tuning), ("time", CellTime), ("floor", Interval)):
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                raise CampaignError(
                    f"{self}: {name} is {type(value).__name__}, not {kind.__name__}"
                )
        if self.time is not None and self.role == "correctness_only":
            raise CampaignError(f"{self} is correctness_only: it can never have a time")
        if self.time is not None and self.correctness != "passed":
            raise CampaignError(f"{self} has a time, but its correctness is {self.correctness!r}")
        if self.correctness == INVALID_BY_DESIGN:
            if self.role != "testbed":
                raise CampaignError(
                    f"{self} is {INVALID_BY_DESIGN}, but of the role {self.role!r}: only a testbed kernel can be"
                )
            if self.floor is not None:
                raise CampaignError(f"{self} is {INVALID_BY_DESIGN}: it can never have a floor")

    @property
    def key(self) -> CellKey:
        """What makes a cell unique in a campaign."""
        return (self.kernel, self.format, self.shape, self.N, self.K, self.M, self.regime)

    def __str__(self) -> str:
        return name_of(self.key)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CellRow:
        """A row from its JSON value. Unknown, missing or impossible parts are a CampaignError."""
        closed(value, cls, "cell")
        parts = dict(value)
        for name, kind in (("tuning", Tuning), ("time", CellTime), ("floor", Interval)):
            if parts[name] is not None:
                closed(parts[name], kind, f"cell {name}")
                parts[name] = kind(**parts[name])
        return cls(**parts)


@dataclass(frozen=True)
class CheckRow:
    """One correctness check of a kernel on a problem; `measured` must not exceed `limit` where both are numbers.

    A failed check may have measured NaN or infinity: the number becomes null and `detail` says it.
    """

    kernel: str
    format: str
    shape: str
    N: int
    K: int
    M: int
    name: str
    passed: bool
    measured: float | None = None
    limit: float | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        _problem(self)
        if not isinstance(self.name, str) or not self.name:
            raise CampaignError(f"check of {self.kernel}: name {self.name!r} is empty")
        if not isinstance(self.passed, bool):
            raise CampaignError(
                f"check {self.name} of {self.kernel}: passed={self.passed!r} is not true or false"
            )
        if not isinstance(self.detail, str):
            raise CampaignError(
                f"check {self.name} of {self.kernel}: detail {self.detail!r} is not text"
            )
        for name in ("measured", "limit"):
            value = getattr(self, name)
            if value is None or (not isinstance(value, bool) and math.isfinite(value)):
                continue
            if self.passed:
                raise CampaignError(
                    f"check {self.name} of {self.kernel} passed with {name}={value!r}"
                )
            # JSON has no NaN, and a failed check is when one turns up: it stays as words.
            object.__setattr__(self, name, None)
            object.__setattr__(self, "detail", f"{self.detail} ({name} was {value})".strip())
        if (
            self.passed
            and self.measured is not None
            and self.limit is not None
            and self.measured > self.limit
        ):
            raise CampaignError(
                f"check {self.name} of {self.kernel} passed with measured={self.measured} above limit={self.limit}"
            )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckRow:
        """A row from its JSON value."""
        closed(value, cls, "check")
        return cls(**value)


@dataclass(frozen=True)
class AttemptRow:
    """One thing that was tried, whatever became of it. The cell's columns are null where it was no single cell.

    `seconds` is null when the process ended without a word.
    """

    stage: str
    status: str
    reason: str | None
    started_utc: str
    seconds: float | None
    kernel: str | None = None
    format: str | None = None
    shape: str | None = None
    N: int | None = None
    K: int | None = None
    M: int | None = None
    regime: str | None = None

    def __post_init__(self) -> None:
        _one_of(self, "status", STATUSES)
        if not self.stage or not isinstance(self.stage, str):
            raise CampaignError(f"attempt without a stage: {self.stage!r}")
        if (self.status == "ok") != (self.reason is None):
            raise CampaignError(
                f"attempt {self.stage}: status {self.status!r} with reason {self.reason!r}"
            )
        if not utc_pattern(self.started_utc):
            raise CampaignError(
                f"attempt {self.stage}: started_utc {self.started_utc!r} is not a UTC time"
            )
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise CampaignError(f"attempt {self.stage}: seconds={self.seconds!r}")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AttemptRow:
        """A row from its JSON value."""
        closed(value, cls, "attempt")
        return cls(**value)


#: Why a point of a closed campaign is not there: what its attempt says, in a protocol that has `closing`.
NOT_REACHED = "not reached: the minutes of the campaign were used up"


class NotReached(str):
    """Why a constant is missing: points behind it were not reached, so no older campaign stands in either."""


def not_reached(attempts: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int, int]]:
    """Points (shape, N, K, M) that the minutes of a closed campaign did not reach, in the order of the journal."""
    return [
        (a["shape"], a["N"], a["K"], a["M"])
        for a in attempts
        if (a["stage"], a["status"], a["reason"]) == ("point", "refused", NOT_REACHED)
    ]


def to_json(row: CellRow | CheckRow | AttemptRow) -> dict[str, Any]:
    """The JSON value of a row: exactly its fields."""
    return asdict(row)


def name_of(key: CellKey) -> str:
    """A cell's name for messages: `cublaslt_fp8 fp8_e4m3 q_o_proj 4096x4096 M=1 cold_graph`."""
    kernel, fmt, shape, n, k, m, regime = key
    return f"{kernel} {fmt} {shape} {n}x{k} M={m} {regime}"


def closed(value: Any, cls: type, where: str) -> None:
    """Refuse a JSON object whose keys are not exactly the fields of `cls`."""
    names = {f.name for f in fields(cls)}
    if not isinstance(value, Mapping):
        raise CampaignError(f"{where} is {type(value).__name__}, not an object")
    if unknown := sorted(set(value) - names):
        raise CampaignError(f"{where} has unknown keys {unknown}")
    if missing := sorted(names - set(value)):
        raise CampaignError(f"{where} lacks the keys {missing}")


def _problem(row: CellRow | CheckRow) -> None:
    for name in ("kernel", "format", "shape"):
        value = getattr(row, name)
        if not isinstance(value, str) or not value:
            raise CampaignError(f"{type(row).__name__}: {name}={value!r} is not a name")
    if not KERNEL_ID.fullmatch(row.kernel):
        raise CampaignError(
            f"{type(row).__name__}: kernel={row.kernel!r} is no kernel id, such as cublaslt_fp8, testbed/<variant>,"
            " cause/<experiment>/<value>, probe/<name>, peer/<name>, qgemv_mx/<mode> or qgemm_mx/<mode>"
        )
    for name in ("N", "K", "M"):
        value = getattr(row, name)
        if type(value) is not int or value < 1:
            raise CampaignError(
                f"{row.kernel} {row.format} {row.shape}: {name}={value!r} is not an integer above 0"
            )


def _one_of(row: Any, name: str, allowed: tuple[str, ...]) -> None:
    if getattr(row, name) not in allowed:
        raise CampaignError(
            f"{type(row).__name__}: {name}={getattr(row, name)!r} is not one of {', '.join(allowed)}"
        )
