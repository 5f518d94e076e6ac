"""What a recorded campaign must satisfy beyond its hashes: source, bytes, constants and the frozen protocol.

`records.verify` asks whether a campaign agrees with itself. Whoever rewrites all of it can make it so; here it is held
against what is not in it: the commit that it names, the formats, and the order, number and dropping of legs that the
frozen protocol prescribes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab import (
    analysis_r1,
    files,
    plan_r1,
    plan_r2,
    plan_r2b,
    protocol,
    records,
    registry,
    samples,
    seal,
    select,
    source,
)
from lab.derived import derived, is_derived
from lab.device import THROTTLE_REASONS
from lab.plan import Point
from lab.registry import Problem
from lab.rows import INVALID_BY_DESIGN, PEER_FAMILY, CampaignError, name_of, not_reached
from qgemm_mx.formats import weight_bytes

FOLDER = select.CAMPAIGNS
COLD = records.FLOOR_REGIME
# Rungs and parts of one whose protocol has a plan of points, and what makes it.
PLANNED = {"R1": plan_r1.points, "R2": plan_r2.points, "R2b": plan_r2b.points}
# A stream reads as many bytes as the cell beside it, and may itself be faster. A testbed variant that leaves the
# reading out is wrong by design and has no time at all.
NEED_NO_FLOOR = ("floor",)
AFTER = "_after"  # the checks of an arm after its legs: one that fails only there was timed, and lost its legs
TOLERANCE = 1e-9  # of a constant or a counter that follows from others
SHARE = "share/"  # of a constant that is the share of a cause
# Counters that follow from others, by name (lab.counters, lab.counters_r1, lab.sass_counts).
RATIO, READ = "dram_bytes_over_weight_bytes", "dram__bytes_read.sum"
SASS, TOTAL = "sass_", "sass_total"
TOTALS = (TOTAL, "sass_loop_total")
# A reading every period is asked for; a thread may be late, but a leg without one for this long was not watched.
UNWATCHED_PERIODS = 25
SEE = "see what is said of "  # the campaign: its reasons are given once, not with every claim
MOST_REASONS = 8  # of one campaign, the rest is counted
MOST_LETTERS = 600  # of one reason
POINT = ["shape", "N", "K", "M", "regime"]
CLOSING = "closing"  # of a protocol whose campaigns their minutes may end

Rules = Callable[[Path, Path], Sequence[Problem]]


@dataclass(frozen=True)
class Shelf:
    """What is wrong with the folders of data/campaigns; `invalid` and `tampered` map an id to where the reasons are."""

    problems: tuple[Problem, ...]
    invalid: dict[str, str]
    tampered: dict[str, str]


def inspect(
    repo: Path, folders: Sequence[Path], verify: Callable[[Path], list[str]], rules: Rules
) -> Shelf:
    """Verify all folders, whatever their device or kind, and hold those that agree with themselves against `rules`."""
    found: list[Problem] = []
    for folder in folders:
        name = f"{FOLDER.as_posix()}/{folder.name}"
        try:
            wrong = [Problem("INVALID", name, reason) for reason in verify(folder)]
            wrong = wrong or list(rules(repo, folder))
        except Exception as error:  # noqa: BLE001 - data of any kind, and each must end in a status
            wrong = [
                Problem("INVALID", name, f"cannot be audited: {type(error).__name__}: {error}")
            ]
        found += _shortened(wrong)
    by_status: dict[str, dict[str, str]] = {"INVALID": {}, "TAMPERED": {}}
    for problem in found:
        kept = by_status.get(problem.status, {})
        kept[Path(problem.path).name] = f"{SEE}{problem.path}"
    return Shelf(tuple(found), by_status["INVALID"], by_status["TAMPERED"])


def _shortened(wrong: list[Problem]) -> list[Problem]:
    def short(text: str) -> str:
        return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "..."

    kept = [Problem(p.status, p.path, short(p.reason)) for p in wrong[:MOST_REASONS]]
    if more := wrong[MOST_REASONS:]:
        kept.append(Problem(more[0].status, more[0].path, f"and {len(more)} more such reasons"))
    return kept


def shelf_entries(repo: Path) -> list[Path]:
    """Everything in data/campaigns, folder or not; names with a dot are campaigns that are being written."""
    root = Path(repo, FOLDER)
    entries = root.iterdir() if root.is_dir() else []
    return sorted(p for p in entries if not p.name.startswith("."))


def problems(repo: Path, folder: Path) -> list[Problem]:
    """All rules of this module, on a campaign that `records.verify` has nothing against."""
    name = f"{FOLDER.as_posix()}/{folder.name}"
    record = seal.read_json(folder / seal.CAMPAIGN)
    found = list(source_problems(repo, record["source"]))
    frozen = _frozen_protocol(repo, record["rung"])
    plan = frozen[0].get("plan") if frozen is not None else None
    floors = plan["floors"] if plan is not None else None
    if frozen is None:  # said elsewhere; which streams were owed nobody knows
        floors = ()
    reasons = [*byte_problems(record["cells"], floors), *constant_problems(record["constants"])]
    reasons += counter_problems(record["cells"], record["counters"])
    if (
        frozen is not None and record["protocol_sha256"] == frozen[1]
    ):  # else the verdict is DEVIATED
        legs = samples.read_table(folder / seal.SAMPLES, samples.SAMPLES_SCHEMA)
        readings = samples.read_table(folder / seal.TELEMETRY, samples.TELEMETRY_SCHEMA)
        if record["seed"] != frozen[0]["seed"]:
            reasons.append(f"seed {record['seed']} is not the frozen {frozen[0]['seed']}")
        reasons += plan_problems(frozen[0], record["cells"], record["checks"], legs)
        if plan is not None and record["kind"] == "campaign":  # a pilot may be a part
            shapes = files.read_json(repo / "prereg" / "shapes.json")["shapes"]
            points = PLANNED[record["rung"]]
            lost = not_reached(record["attempts"])
            reasons += point_problems(frozen[0], shapes, record["cells"], points, lost)
        reasons += span_problems(legs)
        reasons += drop_problems(frozen[0], legs, readings)
    return [Problem(status, name, reason) for status, reason in found] + [
        Problem("INVALID", name, reason) for reason in reasons
    ]


def _frozen_protocol(repo: Path, rung: str) -> tuple[dict[str, Any], str] | None:
    """A rung's protocol with its SHA-256, as frozen; None where it is not (another one is DEVIATED or TAMPERED)."""
    name = protocol.file_of(rung)
    path = repo / name
    digest = registry.frozen_files(repo / "prereg").get(name)
    if digest is None or not path.is_file() or files.sha256(path) != digest:
        return None
    return files.read_json(path), digest


# Source.


def source_problems(repo: Path, said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Whether the commit that a campaign names has the source files that it measured. Yields (status, reason).

    Without git where it was measured, the stated commit stands in: its digest proves it all the same. One measured on
    a changed tree that no commit has (`source.measured_commit`) has a verdict of its own, DEVIATED.
    """
    commit = source.measured_commit(repo, said)
    if said["dirty"] and commit is None:
        return
    if commit is None:
        yield "UNVERIFIABLE", "records no commit that its source could be recomputed from"
        return
    try:
        digests = {
            "tree_digest": source.commit_digest(repo, commit),
            "kernels_digest": source.commit_kernels_digest(repo, commit),
        }
    except source.SourceError as error:
        yield "TAMPERED", f"names commit {commit[:12]} as its source: {error}"
        return
    for name, found in digests.items():
        recorded = said.get(name)
        if found is None and name == "tree_digest":
            yield (
                "UNVERIFIABLE",
                f"its {name} cannot be recomputed: commit {commit[:12]} is not here",
            )
        elif found is not None and recorded is not None and recorded != found:
            yield (
                "TAMPERED",
                f"{name} is {recorded[:12]}, but commit {commit[:12]} has {found[:12]}",
            )


# Bytes.


def byte_problems(
    cells: Sequence[Mapping[str, Any]], floors: Collection[str] | None = None
) -> Iterator[str]:
    """Cells whose bytes are not those of their format, or that took less time than reading those bytes takes.

    `floors`: formats whose bytes the protocol has a stream read; None: all that are timed.
    """
    for cell in cells:
        name = _name(cell)
        try:
            right = weight_bytes(cell["format"], cell["N"], cell["K"])
        except (KeyError, ValueError) as error:
            yield f"{name}: its weights have no known size: {error}"
            continue
        if cell["weight_bytes"] != right:
            yield f"{name}: weight_bytes is {cell['weight_bytes']}, but its weights take {right}"
        time, floor = cell["time"], cell["floor"]
        if cell["regime"] != COLD or time is None or cell["role"] in NEED_NO_FLOOR:
            continue
        if floor is None:
            if floors is not None and cell["format"] not in floors:
                continue
            yield f"{name}: it has a cold time, but no stream of its {right} bytes was timed"
        elif time["ci_high_us"] < floor["ci_low_us"]:
            yield (
                f"{name}: faster than reading its bytes: at most {time['ci_high_us']:.4g} us, the stream takes "
                f"{floor['ci_low_us']:.4g} us or more"
            )


def _name(row: Mapping[str, Any]) -> str:
    key = ("kernel", "format", "shape", "N", "K", "M", "regime")
    return name_of(tuple(row[k] for k in key))


# Constants.


def constant_problems(constants: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Constants outside their own interval, that only legs can give, or that do not follow from others."""
    for name, row in constants.items():
        low, high = row["ci_low"], row["ci_high"]
        if low is not None and high is not None and not low <= row["value"] <= high:
            yield f"constant {name}: its value {row['value']} is outside its own interval {low} to {high}"
        if name.startswith(SHARE) or analysis_r1.gives(name):
            # Recorded, it would stand in where the legs of an R1 campaign give none.
            yield f"constant {name} is recorded, but follows from legs alone"
    said = {name: row for name, row in constants.items() if is_derived(name)}
    if not said:
        return
    try:
        right = derived(constants)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        yield f"constants {', '.join(sorted(said))} follow from one that is not recorded: {error}"
        return
    for name, row in said.items():
        if name not in right:
            yield f"constant {name} follows from no others"
            continue
        for key in ("value", "ci_low", "ci_high"):
            if row[key] is None or not math.isclose(row[key], right[name][key], rel_tol=TOLERANCE):
                yield f"constant {name}: {key} is {row[key]}, but {right[name]['how']} gives {right[name][key]}"


# Counters.


def counter_problems(
    cells: Sequence[Mapping[str, Any]], counters: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Counter rows of what was not measured, that occur twice, or that contradict each other.

    Two kinds follow from others: bytes read over the bytes of the weights, and the instructions of an entry, which are
    those of its opcodes.
    """
    key = ("kernel", "format", "shape", "N", "K", "M")
    measured = {tuple(cell[k] for k in key) for cell in cells}
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in counters:
        place = tuple(row[k] for k in key)
        name = name_of((*place, row["regime"]))
        if place not in measured:
            yield f"counter {row['metric']} is of {name}, which was not measured"
            continue
        group = groups.setdefault((*place, row["regime"]), {})
        if row["metric"] in group:
            yield f"counter {row['metric']} of {name} is given twice"
        group[row["metric"]] = row["value"]
    for place, group in groups.items():
        _, fmt, _, n, k, *_ = place
        if {RATIO, READ} <= set(group):
            right = group[READ] / weight_bytes(fmt, n, k)
            if not math.isclose(group[RATIO], right, rel_tol=TOLERANCE):
                yield f"counter {RATIO} of {name_of(place)} is {group[RATIO]}, but {READ} gives {right}"
        if TOTAL in group:
            opcodes = [name for name in group if name.startswith(SASS) and name not in TOTALS]
            if group[TOTAL] != (right := sum(group[name] for name in opcodes)):
                yield f"counter {TOTAL} of {name_of(place)} is {group[TOTAL]:g}, but its opcodes add up to {right:g}"


def closed(folder: Path) -> str | None:
    """A note on a campaign that its minutes ended; None where its plan was measured to the end."""
    try:
        record = seal.read_json(folder / seal.CAMPAIGN)
        lost = not_reached(record["attempts"])
        taken = {tuple(cell[k] for k in POINT[:-1]) for cell in record["cells"]}
    except (CampaignError, LookupError, TypeError):
        return None
    if not lost:
        return None
    return (
        f"{folder.name}: closed by its minutes, {len(lost)} of {len(lost) + len(taken)} points of its plan were not "
        f"reached, the first {_place(lost[0])}; a claim about any of them is not judged by it"
    )


def without_legs(folder: Path) -> str | None:
    """A note on the constants of a campaign that no leg stands behind; None where there are none."""
    try:
        constants = seal.read_json(folder / seal.CAMPAIGN)["constants"]
        names = [name for name in constants if not is_derived(name)]
    except (CampaignError, LookupError, TypeError):
        return None
    if not names:
        return None
    return (
        f"{folder.name}: {len(names)} constants, such as {names[0]}, have no legs in samples.parquet: their values "
        "rest on campaign.json alone"
    )


# The plan of legs.


def plan_problems(
    frozen: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    checks: Sequence[Mapping[str, Any]],
    legs: pd.DataFrame,
) -> Iterator[str]:
    """Where regimes, number of blocks, extensions or the order of legs are not what the protocol prescribes."""
    runs = _runs(cells, checks)
    # As Python's own text: the points are many and small, and Arrow's columns are slow to cut up.
    legs = legs.astype({name: object for name in ("shape", "regime", "kernel", "format", "arm")})
    for key in sorted(set(runs) - set(legs.groupby(POINT[:-1]).groups)):
        if not all(run.lost for run in runs[key]):
            yield f"{_place(key)} has arms, but no legs"
    for key, point in legs.groupby(POINT[:-1], sort=False):
        found = set(point["regime"])
        planned = protocol.regimes_at(frozen, key[0], key[3])
        for regime in sorted(found ^ set(planned)):
            what = "no regime of the protocol" if regime in found else "missing"
            yield f"{_place(key)} {regime}: {what}"
        for regime, part in point.groupby("regime", sort=False):
            if regime in planned:
                where = f"{_place(key)} {regime}"
                arms = _arms(frozen, runs.get(key, []), part, key, regime)
                yield from (f"{where}: {text}" for text in _run_problems(frozen, key, arms, part))


def _place(key: Sequence[Any]) -> str:
    shape, n, k, m = key
    return f"{shape} {n}x{k} M={m}"


def point_problems(
    frozen: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Any]],
    cells: Sequence[Mapping[str, Any]],
    points: Callable[..., Sequence[Point]] = plan_r1.points,
    lost: Sequence[tuple[Any, ...]] = (),
) -> Iterator[str]:
    """Points and arms that are in a campaign and not in the plan of its protocol, or the reverse.

    points: what makes the plan of the rung. Which peers could run is the machine's matter: a peer that is missing has
    an attempt, and is no problem here. lost: points recorded as not reached, see `lab.rows.not_reached`; they may be
    missing where the protocol has `closing`.
    """
    peers: dict[str, dict[str, None]] = {}
    measured: dict[tuple[Any, ...], set[tuple[str, str]]] = {}
    for cell in cells:
        place = (cell["shape"], cell["N"], cell["K"], cell["M"])
        measured.setdefault(place, set()).add((cell["kernel"], cell["format"]))
        if cell["kernel"].startswith(PEER_FAMILY):
            peers.setdefault(cell["kernel"], {})[cell["format"]] = None
    offered = {kernel: tuple(formats) for kernel, formats in peers.items()}
    planned = {
        (p.shape["name"], p.shape["N"], p.shape["K"], p.m): set(p.arms)
        for p in points(frozen, shapes, offered)
    }
    for place in sorted(set(measured) - set(planned)):
        yield f"{_place(place)} is no point of the plan"
    yield from _closing_problems(frozen, list(planned), measured, lost)
    allowed = set(lost) if CLOSING in frozen else set()
    if missing := sorted(set(planned) - set(measured) - allowed):
        yield f"{len(missing)} points of the plan are missing, the first {_place(missing[0])}"
    for place in sorted(set(planned) & set(measured)):
        for arm in sorted(measured[place] - planned[place]):
            yield f"{_place(place)}: {' '.join(arm)} is no arm of the plan there"
        lost = {a for a in planned[place] - measured[place] if not a[0].startswith(PEER_FAMILY)}
        for arm in sorted(lost):
            yield f"{_place(place)}: {' '.join(arm)} of the plan is missing"


def _closing_problems(
    frozen: Mapping[str, Any],
    planned: Sequence[tuple[Any, ...]],
    measured: Collection[tuple[Any, ...]],
    lost: Sequence[tuple[Any, ...]],
) -> Iterator[str]:
    """Points recorded as not reached that no minutes can have cut off: these are the last of the frozen order."""
    if lost and CLOSING not in frozen:
        yield f"{len(lost)} points are recorded as not reached, which the protocol does not know"
        return
    for place, times in Counter(lost).items():
        said = f"{_place(place)} is recorded as not reached"
        if times > 1:
            yield f"{said} {times} times"
        if place in measured:
            yield f"{said}, but was measured"
        elif place not in planned:
            yield f"{said}, but is no point of the plan"
    cut = next((i for i, place in enumerate(planned) if place in lost), len(planned))
    if later := [p for p in planned[cut:] if p in measured and p not in lost]:
        yield (
            f"{_place(later[0])} was measured, but {_place(planned[cut])}, before it in the frozen order, is recorded "
            "as not reached"
        )


@dataclass(frozen=True)
class _Run:
    """An arm that ran at a point. `lost`: its legs were taken away; `wrong`: it is wrong by design."""

    arm: tuple[str, str]
    role: str
    lost: bool
    wrong: bool


def _runs(
    cells: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]]
) -> dict[tuple[Any, ...], list[_Run]]:
    """Point -> its timed arms in their order."""
    place = ("shape", "N", "K", "M")
    early = {
        (*(c[k] for k in place), c["kernel"], c["format"])
        for c in checks
        if not c["passed"] and not c["name"].endswith(AFTER)
    }
    found: dict[tuple[Any, ...], dict[tuple[str, str], _Run]] = {}
    for cell in cells:
        point, arm = tuple(cell[k] for k in place), (cell["kernel"], cell["format"])
        if cell["role"] == "correctness_only" or (*point, *arm) in early:
            continue
        state = cell["correctness"]
        run = _Run(arm, cell["role"], state == "failed", state == INVALID_BY_DESIGN)
        found.setdefault(point, {}).setdefault(arm, run)
    return {point: list(arms.values()) for point, arms in found.items()}


def _arms(
    frozen: Mapping[str, Any],
    runs: Sequence[_Run],
    part: pd.DataFrame,
    point: Sequence[Any],
    regime: str,
) -> list[tuple[str, _Run]]:
    """Arms of a point in a regime by name, in the order that the plan permutes, duplicates last."""
    shape, m = point[0], point[3]
    headline = regime == frozen["regimes"]["headline"]
    taken = dict.fromkeys(zip(part["kernel"], part["format"], part["arm"], strict=True))
    names = {
        (kernel, fmt): arm
        for kernel, fmt, arm in taken
        if not arm.endswith(samples.DUPLICATE_SUFFIX)
    }
    arms, twins = [], []
    for run in runs:
        kernel = run.arm[0]
        if not protocol.takes_part(frozen, (kernel, run.role), run.wrong, shape, m, regime):
            continue
        name = names.get(run.arm, "/".join(run.arm))
        arms.append((name, run))
        if headline and kernel in protocol.twin_kernels(frozen):
            twins.append((name + samples.DUPLICATE_SUFFIX, run))
    return arms + twins


def _run_problems(
    frozen: Mapping[str, Any],
    key: Sequence[Any],
    arms: Sequence[tuple[str, _Run]],
    part: pd.DataFrame,
) -> Iterator[str]:
    shape, m, regime = key[0], key[3], part["regime"].iloc[0]
    names, lost = [name for name, _ in arms], {name for name, run in arms if run.lost}
    wrong_by_design = {name for name, run in arms if run.wrong}
    if wrong := sorted(set(part["arm"]) ^ (set(names) - lost)):
        yield f"arms {', '.join(wrong)} are not those that the protocol times there"
        return
    n = protocol.planned_blocks(frozen, m, regime)
    taken = sorted(set(part["block"]))
    headline = regime == frozen["regimes"]["headline"]
    whole = n * (1 + frozen["blocks"]["extension"]["times"]) if headline else n
    if taken not in (list(range(n)), list(range(whole))):
        allowed = f"{n}" if n == whole else f"{n}, or {whole} with the extension"
        yield f"has blocks {taken[0]} to {taken[-1]} ({len(taken)}); the protocol takes {allowed}"
        return
    if (part["extension"] != (part["block"] >= n)).any():
        yield f"legs are marked as extension where the block is not past the first {n}, or the reverse"
    if headline and not lost:  # the width of an arm that lost its legs may have decided
        deciding = part[(part["block"] < n) & ~part["arm"].isin(wrong_by_design)]
        wide = protocol.too_wide(deciding, frozen["blocks"]["extension"]["half_width"])
        if wide != (len(taken) == whole):
            said = "is extended" if not wide else "is not extended"
            yield f"{said}, but its first {n} blocks are {'too' if wide else 'not too'} wide for the protocol"
    order = protocol.block_order(frozen, names, shape, m, regime)
    seen: dict[int, dict[int, str]] = {}
    for block, at, name in zip(part["block"], part["position"], part["arm"], strict=True):
        seen.setdefault(block, {})[at] = name
    for block, places in seen.items():
        right = {at: name for at, name in enumerate(order[block]) if name not in lost}
        if places != right:
            yield f"block {block}: its legs are not in the order of the frozen seed"
            return


# The clock of the legs.


def span_problems(legs: pd.DataFrame) -> Iterator[str]:
    """Legs that took longer on the device than on the host's clock, or that began before the one before had ended."""
    took = (legs["t_n_us"] + legs["t_2n_us"].fillna(0.0)).to_numpy() * 1e3
    start, end = legs["start_ns"].to_numpy(), legs["end_ns"].to_numpy()
    early = np.zeros(len(legs), bool)
    # A start before that of the leg before is another sitting's clock.
    early[1:] = (start[1:] < end[:-1]) & (start[1:] >= start[:-1])
    for bad, what in (
        (took > end - start, "took longer than from their start to their end"),
        (early, "began before the leg before them had ended"),
    ):
        if count := int(np.count_nonzero(bad)):
            yield f"{count} legs {what}, the first of {_leg(legs.iloc[int(np.argmax(bad))])}"


def _leg(leg: pd.Series) -> str:
    return f"{leg['arm']} {leg['shape']} M={leg['M']} {leg['regime']} block {leg['block']}"


# Dropped legs.


def drop_problems(
    frozen: Mapping[str, Any], legs: pd.DataFrame, readings: pd.DataFrame
) -> Iterator[str]:
    """Legs that no reading watched, that should have dropped and did not, or that dropped for no reason.

    A reading that came within the margin after the last leg of a run may have come too late for the decision: it
    allows a drop, but does not ask for one.
    """
    for part, watched in _sittings(legs, readings):
        yield from _drop_problems(frozen, part, watched)


def _sittings(
    legs: pd.DataFrame, readings: pd.DataFrame
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Legs with the readings of their sitting: the clock of another process or machine may start anew."""

    def parts(frame: pd.DataFrame, column: str) -> list[pd.DataFrame]:
        step = np.diff(frame[column].to_numpy(), prepend=frame[column].iloc[:1]) < 0
        return [part for _, part in frame.groupby(np.cumsum(step), sort=True)]

    if legs.empty:
        return []
    of_legs, of_readings = parts(legs, "start_ns"), parts(readings, "t_ns")
    if len(of_legs) == len(of_readings):
        return list(zip(of_legs, of_readings, strict=True))
    return [(part, readings) for part in of_legs]


def _drop_problems(
    frozen: Mapping[str, Any], legs: pd.DataFrame, readings: pd.DataFrame
) -> Iterator[str]:
    margin, reasons = protocol.margin_ns(frozen), frozen["telemetry"]["drop_reasons"]
    start, end = legs["start_ns"].to_numpy(), legs["end_ns"].to_numpy()
    readings = readings.sort_values("t_ns")
    times = readings["t_ns"].to_numpy()
    bits = readings["throttle_reasons"].fillna(0).astype("int64").to_numpy()

    def any_between(at: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.searchsorted(at, high, side="right") > np.searchsorted(at, low, side="left")

    def say(bad: np.ndarray, what: str) -> Iterator[str]:
        if count := int(np.count_nonzero(bad)):
            yield f"{count} legs {what}, the first of {_leg(legs.iloc[int(np.argmax(bad))])}"

    far = UNWATCHED_PERIODS * margin
    yield from say(
        ~any_between(times, start - far, end + far),
        f"have no telemetry within {far / 1e6:g} ms",
    )
    said = legs["drop_reason"].fillna("").to_numpy(dtype=str)
    owed = np.zeros(len(legs), bool)
    for name in reasons:
        at = times[(bits & THROTTLE_REASONS[name]) != 0]
        owed |= any_between(at, start - margin, end)
        unseen = (said == name) & ~any_between(at, start - margin, end + margin)
        yield from say(unseen, f"were dropped for {name}, which no reading shows")
    kept = ~legs["dropped"].to_numpy(bool)
    yield from say(owed & kept, f"ran while a reading shows {' or '.join(reasons)}, and were kept")
    slope = said == protocol.SLOPE
    yield from say(
        slope & (legs["time_us"].to_numpy() > 0), f"were dropped as {protocol.SLOPE}, but it is"
    )
    unknown = ~kept & ~slope & ~np.isin(said, reasons)
    yield from say(unknown, "were dropped for a reason that the protocol does not have")
