"""A campaign in pieces: kits of shapes, arms of points, the order of steps. What measuring R1 and R2 share.

One journal: the same command goes on where the last one stopped. A point is taken as in R0 (lab.measure): gate,
interleaved blocks, gate again. What is prepared for a shape (weights, layouts, compiled kernels of the peers) is
prepared once and freed behind its last point. A rung gives its points, its own arms and its opening as `Steps`. This
module never reads a prediction: an audit hook refuses the open of one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from lab import constants, device, records, source
from lab.arms import Arm, CublasLtArm, SharedProducts, StreamArm, tune_stream
from lab.bench import Bench, forbid_predictions
from lab.journal import PartialCampaign
from lab.measure import Selection, check_occupancy, failures, header, measure_point
from lab.operands import WeightCopies, decode_activations, make_activations, make_weights
from lab.peer_arm import make_arm, missing_rows, unsupported_row
from lab.peers import Peer, discover
from lab.peers._interface import WARM
from lab.peers._torch import free_memory
from lab.plan import BASELINES, FLOOR, ArmName, Point
from lab.protocol import file_of
from lab.rows import NOT_REACHED, AttemptRow
from lab.samples import TELEMETRY_SCHEMA
from qgemm_mx import build
from qgemm_mx.build import BuildRecord
from qgemm_mx.formats import weight_bytes
from qgemm_mx.probes import CheckResult

#: FP64 products of a point that are kept, at most: 24 GB are six of the largest.
PRODUCT_BYTES = 24 * 10**9
#: With less than this left of its minutes a run leaves the profiler pass to the next.
COUNTERS_MINUTES = 2.5
#: Arms at a point of a chain of layers.
CHAIN_REGIME, CHAIN_GROUP = "chain_pdl", "chain"
#: Roles of cubins whose launches follow from a plan of their own: `check_occupancy` knows those of the instrument.
PLANNED_ROLES = ("testbed", "product")

Log = Callable[[str], None]


class Unfinished(RuntimeError):
    """The minutes of this run are used up; the message says what is left. The same command goes on."""


# ---- operands of a shape -----------------------------------------------------------------------------------------


@dataclass
class Kit:
    """What the points of a shape share: weights and streams by format, layouts of the testbed, prepared peers.

    `lost`: why a peer could not be prepared, by (kernel, format); it is named once and then left out.
    """

    shape: Mapping[str, Any]
    weights: dict[str, WeightCopies] = field(default_factory=dict)
    streams: dict[str, StreamArm] = field(default_factory=dict)
    layouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    layers: list[WeightCopies] = field(default_factory=list)
    handles: dict[tuple[str, str], Any] = field(default_factory=dict)
    lost: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class Activations:
    """Activations of a point, BF16 patterns and E4M3 codes, each with its float64 value: one object for all arms."""

    bf16: Any
    fp8: Any
    bf16_64: Any
    fp8_64: Any

    @classmethod
    def make(cls, bench: Bench, m: int, k: int) -> Activations:
        """Fresh random activations [M, K]."""
        bf16, fp8 = make_activations(bench.random, m, k)
        return cls(bf16, fp8, decode_activations(bf16), decode_activations(fp8))


class Workshop:
    """Makes the kits of shapes and the arms of points. Everything that takes time happens here, before any leg."""

    def __init__(
        self, bench: Bench, peers: Sequence[Peer], note: Callable[[AttemptRow], None], log: Log
    ) -> None:
        """`note` records what is left out: a problem that a peer does not take, a call that raised."""
        self.bench, self.log, self._note = bench, log, note
        self.peers = {peer.NAME: peer for peer in peers}
        self.budget = int(bench.protocol["peers"]["budget"])

    def kit(self, points: Sequence[Point]) -> Kit:
        """Weights of a shape, fresh for this run, the fastest stream of each floor, and the peers prepared."""
        bench, shape = self.bench, points[0].shape
        kit = Kit(shape)
        n, k = shape["N"], shape["K"]
        for fmt in dict.fromkeys(f for p in points for f in p.formats):
            copies = bench.copies(weight_bytes(fmt, n, k))
            kit.weights[fmt] = make_weights(bench.random, fmt, n, k, copies)
        sms = bench.probe["sm_count"]
        arms = dict.fromkeys(arm for p in points for arm in p.arms)
        for fmt in [fmt for kernel, fmt in arms if kernel == FLOOR]:
            kit.streams[fmt] = tune_stream(
                bench.timer, bench.modules, kit.weights[fmt], bench.protocol, sms
            )
        self.lay_out(kit, points)
        for kernel, fmt in [arm for arm in arms if arm[0] in self.peers]:
            self._prepare(kit, kernel, fmt, points[0].m)
        return kit

    def lay_out(self, kit: Kit, points: Sequence[Point]) -> None:
        """What the rung's own arms need of a shape; nothing here."""

    def own_arms(self, kit: Kit, point: Point, x: Activations) -> dict[ArmName, Arm]:
        """The rung's own arms of a point, by name; none here."""
        return {}

    def _prepare(self, kit: Kit, kernel: str, fmt: str, m: int) -> None:
        peer, shape = self.peers[kernel], kit.shape
        row = unsupported_row(peer, fmt, shape["name"], shape["N"], shape["K"], m)
        if row is not None:
            kit.lost[kernel, fmt] = row.reason or ""
            self._note(replace(row, M=None))
            return
        # Two adaptors of one package may share their preparation: it is then made once.
        for (other, other_fmt), handle in kit.handles.items():
            if other_fmt == fmt and self.peers[other].prepare is peer.prepare:
                kit.handles[kernel, fmt] = handle
                return
        weights = kit.weights[fmt]
        try:
            with self.bench.stream:
                kit.handles[kernel, fmt] = peer.prepare(weights, weights.copies)
        except Exception as error:  # a peer of any kind, and the campaign goes on
            kit.lost[kernel, fmt] = _words(error)
            self._note(_failed(kernel, fmt, shape, None, _words(error)))

    def warm(self, kits: Sequence[Kit], points: Sequence[Point]) -> None:
        """Compile what the peers will bind at these points, for all of them at once where an adaptor can."""
        work: dict[Any, dict[int, tuple[Any, list[int]]]] = {}
        for kit in kits:
            own = [p for p in points if p.shape["name"] == kit.shape["name"]]
            for (kernel, fmt), handle in kit.handles.items():
                hook = getattr(self.peers[kernel], WARM, None)
                ms = [p.m for p in own if (kernel, fmt) in p.arms]
                if hook is not None and ms:
                    work.setdefault(hook, {})[id(handle)] = (handle, ms)
        for hook, found in work.items():
            started = time.monotonic()
            try:
                with self.bench.stream:
                    hook(list(found.values()), self.budget)
            except (
                Exception
            ) as error:  # `bind` meets it again, one by one, and notes what it refuses
                self.log(f"compiling ahead: {_words(error)}")
            self.log(f"peers compiled in {time.monotonic() - started:.0f} s")

    def arms(self, kit: Kit, point: Point, x: Activations) -> list[Arm]:
        """The arms of a point in the order of the plan, tuned; a peer that raises is noted and left out."""
        made: dict[ArmName, Arm] = {}
        for kernel, fmt in point.arms:
            if kernel == FLOOR:
                made[kernel, fmt] = kit.streams[fmt]
            elif kernel in BASELINES.values():
                made[kernel, fmt] = self._baseline(kit.weights[fmt], x)
            elif kernel in self.peers and (arm := self._peer(kit, point, kernel, fmt, x)):
                made[kernel, fmt] = arm
        made.update(self.own_arms(kit, point, x))
        return [made[name] for name in point.arms if name in made]

    def _baseline(self, weights: WeightCopies, x: Activations) -> CublasLtArm:
        bench, fp8 = self.bench, weights.format == "fp8_e4m3"
        own, own64 = (x.fp8, x.fp8_64) if fp8 else (x.bf16, x.bf16_64)
        arm = CublasLtArm(weights, own, own64, bench.lt, bench.stream, bench.protocol)
        arm.tune(bench.timer)
        return arm

    def _peer(self, kit: Kit, point: Point, kernel: str, fmt: str, x: Activations) -> Arm | None:
        if (kernel, fmt) not in kit.handles:
            return None
        bench, peer = self.bench, self.peers[kernel]
        x64 = x.fp8_64 if peer.activations == "fp8" else x.bf16_64
        try:
            arm = make_arm(
                peer, kit.handles[kernel, fmt], kit.weights[fmt], x.bf16, x.fp8, bench.stream,
                bench.protocol, self.budget, x64,
            )  # fmt: skip
            arm.tune(bench.timer)
        except Exception as error:  # as above
            self._note(_failed(kernel, fmt, point.shape, point.m, _words(error)))
            return None
        if arm.refused:
            self.log(f"{point.name} {kernel} {fmt}: not timed: {'; '.join(arm.refused)[:200]}")
        return arm


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _failed(
    kernel: str, fmt: str, shape: Mapping[str, Any], m: int | None, reason: str
) -> AttemptRow:
    return AttemptRow(
        stage="peer", status="failed", reason=reason, started_utc=records.utc_now(), seconds=0.0,
        kernel=kernel, format=fmt, shape=shape["name"], N=shape["N"], K=shape["K"], M=m,
    )  # fmt: skip


# ---- a chain of layers -------------------------------------------------------------------------------------------


class ChainPair:
    """A chain of layers under one kernel id: plain launches, and programmatic ones in the regime `chain_pdl`.

    Both are gated before any leg, and afterwards each on the copy of its own last call.
    """

    def __init__(self, plain: Any, programmatic: Any) -> None:
        """Two `lab.testbed.ChainArm` with outputs of their own."""
        self._chains = {"": plain, CHAIN_REGIME: programmatic}
        self._last = dict.fromkeys(self._chains, 0)
        self.kernel, self.format, self.role = plain.kernel, plain.format, plain.role
        self.copies = min(plain.copies, programmatic.copies)
        self.weight_bytes = plain.weight_bytes
        chosen = f"{plain.tuning['chosen']}; {CHAIN_REGIME}: {programmatic.tuning['chosen']}"
        self.tuning: dict[str, Any] | None = {"candidates": 1, "chosen": chosen}
        self.claims_right = True
        self.launches = {CHAIN_REGIME: lambda copy: self._launch(CHAIN_REGIME, copy)}

    def _launch(self, chain: str, copy: int) -> None:
        # The last call that is captured is the last that a leg replays.
        self._last[chain] = copy
        self._chains[chain].launch(copy)

    def launch(self, copy: int) -> None:
        """Enqueue the plain chain."""
        self._launch("", copy)

    def check(self, copy: int, stage: str) -> list[CheckResult]:
        """The gate of both chains."""
        found = []
        for name, chain in self._chains.items():
            last = self._last[name] if stage == "after" else copy
            prefix = f"{name}_" if name else ""
            found += [replace(r, name=prefix + r.name) for r in chain.check(last, stage)]
        return found


# ---- the campaign ------------------------------------------------------------------------------------------------


@dataclass
class Budget:
    """Minutes of one run, and whether the next step may begin: it must be over in time if it takes as long as the
    longest of its kind so far.
    """

    minutes: float | None
    clock: Callable[[], float] = time.monotonic
    longest: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        if self.minutes is None:
            return float("inf")
        return 60 * self.minutes - (self.clock() - self._started)

    def allows(self, kind: str) -> bool:
        """Whether a step of a kind may begin."""
        return self.left() > self.longest.get(kind, 0.0)

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        """Do a step and remember how long it took."""
        started = self.clock()
        result = work()
        self.longest[kind] = max(self.longest.get(kind, 0.0), self.clock() - started)
        return result


@dataclass(frozen=True)
class Steps:
    """What a rung does its own way.

    points: the plan, from protocol, shapes and the formats of the peers that can run here. workshop: makes its arms.
    opening: once a campaign, before any point. counters: the profiler pass, behind the last point.
    """

    rung: str
    points: Callable[
        [Mapping[str, Any], Sequence[Mapping[str, Any]], Mapping[str, Any]], list[Point]
    ]
    workshop: type[Workshop]
    opening: Callable[[Bench, PartialCampaign, Log], None]
    counters: Callable[[Path, Path, PartialCampaign, Budget, Log], None]


def run(
    steps: Steps,
    repo: Path,
    cubin_dir: Path,
    builds: list[BuildRecord],
    log: Log,
    minutes: float | None,
    kind: str,
    selection: Selection,
    partial_root: Path | None,
    close: bool = False,
) -> Path:
    """Measure the campaign of a rung, or go on with it, and write it under data/campaigns. Returns its folder.

    `minutes`: stop between two points rather than go on for longer; Unfinished then says how many points are left.
    `close`: the minutes end the campaign instead, and what they did not reach is recorded as not reached.
    `builds`: the build records of the cubins in `cubin_dir`, all of one architecture.
    """
    budget = Budget(minutes)
    measured_source = source.describe(repo)  # hashes every source file: before the firewall
    forbid_predictions()
    protocol = json.loads((repo / file_of(steps.rung)).read_text(encoding="utf-8"))
    shapes = json.loads((repo / "prereg" / "shapes.json").read_text(encoding="utf-8"))["shapes"]
    bench = Bench.open(protocol, cubin_dir, int(protocol["seed"]))
    if bench.probe["other_processes"]:
        log(f"warning: {bench.probe['other_processes']} other processes use {bench.probe['name']}")
    rows = [record.campaign_row() for record in builds]
    identity = header(steps.rung, kind, repo, bench, rows, measured_source)
    identity["software"] |= peer_versions(discover())
    with PartialCampaign.open(partial_root or repo / ".work" / "partial", identity) as partial:
        telemetry = device.Telemetry(protocol["telemetry"]["period_ms"])
        with telemetry:
            instrument = [b for b in builds if b.role not in PLANNED_ROLES]
            check_occupancy(bench, partial, instrument, log)
            peers = usable_peers(partial, log)
            steps.opening(bench, partial, log)
            offered = {p.NAME: p.formats for p in peers}
            points = chosen(steps.points(protocol, shapes, offered), selection)
            workshop = steps.workshop(bench, peers, lambda row: note(partial, row), log)
            try:
                measure_points(workshop, partial, points, telemetry, budget, log)
            except Unfinished:
                if not close:
                    raise
                not_reached(partial, points, log)
        if selection.with_counters and not partial.counters:
            steps.counters(repo, cubin_dir, partial, Budget(None) if close else budget, log)
        folder = records.finalise(partial, repo / "data")
    log(f"campaign {folder.name} written")
    return folder


def peer_versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Versions of the packages of the peers that can run here, by name with underscores, as `software` records them."""
    found = {}
    for peer in peers:
        availability = peer.available()
        if availability.installed:
            pairs = (text.split(" ", 1) for text in (availability.version or "").split(", "))
            found |= {name.lower().replace("-", "_"): version for name, version in pairs}
    return found


def chosen(points: Iterable[Point], selection: Selection) -> list[Point]:
    """The plan, or the part of it that a selection names: shapes by the start of their name."""
    return [
        p
        for p in points
        if (selection.shapes is None or p.shape["name"].startswith(selection.shapes))
        and (selection.ms is None or p.m in selection.ms)
    ]


def note(partial: PartialCampaign, row: AttemptRow) -> None:
    """Record something that was left out, with its reason."""
    columns = ("kernel", "format", "shape", "N", "K", "M", "regime")
    cell = {name: getattr(row, name) for name in columns if getattr(row, name) is not None}
    with partial.attempt(row.stage, **cell) as attempt:
        end = attempt.refused if row.status == "refused" else attempt.failed
        end(row.reason or "")


def usable_peers(partial: PartialCampaign, log: Log) -> list[Peer]:
    """The peers that can run here. Once a campaign, each missing one gets its rows."""
    usable, missing = missing_rows(discover())
    for row in missing if not partial.finished else ():
        note(partial, row)
    absent = sorted({row.kernel for row in missing if row.kernel})
    log(
        f"peers: {', '.join(p.NAME for p in usable) or 'none'}; not here: {', '.join(absent) or 'none'}"
    )
    return usable


def measure_points(
    workshop: Workshop,
    partial: PartialCampaign,
    points: Sequence[Point],
    telemetry: Any,
    budget: Budget,
    log: Log,
) -> None:
    """Take the points that are not finished, shape by shape. Raises Unfinished between two of them."""
    todo = [p for p in points if p.name not in partial.finished]
    done, started = 0, time.monotonic()
    # The further shapes are many and small: they are prepared together, so that their kernels compile together.
    for _, own in groupby(todo, key=lambda p: "" if p.further else p.shape["name"]):
        batch = list(own)
        if not budget.allows("prepare"):
            stop(partial, len(todo) - done)
        kits = budget.timed("prepare", lambda batch=batch: prepare(workshop, partial, batch))
        for point in batch:
            if not budget.allows("point"):
                stop(partial, len(todo) - done)
            kit = kits[point.shape["name"]]
            budget.timed(
                "point", lambda p=point, k=kit: take_point(workshop, partial, k, p, telemetry)
            )
            done += 1
            left = (time.monotonic() - started) / done * (len(todo) - done)
            log(f"{point.name}: {len(todo) - done} points left, about {left:.0f} s")
        kits.clear()
        del kit
        free()


def not_reached(partial: PartialCampaign, points: Sequence[Point], log: Log) -> None:
    """Record the points that the minutes did not reach: the campaign is closed without them."""
    left = [point for point in points if point.name not in partial.finished]
    for point in left:
        shape = point.shape
        place = {"shape": shape["name"], "N": shape["N"], "K": shape["K"], "M": point.m}
        with partial.attempt("point", **place) as attempt:
            attempt.refused(NOT_REACHED)
    log(f"the campaign is closed without {len(left)} points")


def prepare(workshop: Workshop, partial: PartialCampaign, batch: Sequence[Point]) -> dict[str, Kit]:
    """Kits of the shapes of a batch by name, with the peers compiled and the launch floors of the streams measured."""
    by_shape: dict[str, list[Point]] = {}
    for point in batch:
        by_shape.setdefault(point.shape["name"], []).append(point)
    kits = {name: workshop.kit(own) for name, own in by_shape.items()}
    workshop.warm(list(kits.values()), batch)
    bench = workshop.bench
    for name, kit in kits.items():
        if stream := kit.streams.get("mxfp4"):
            floor = constants.launch_floor(bench.timer, bench.modules, stream, name)
            if not floor.keys() & partial.constants.keys():
                partial.add_constants(floor)
    return kits


def take_point(
    workshop: Workshop, partial: PartialCampaign, kit: Kit, point: Point, telemetry: Any
) -> None:
    """Build, gate, time and record one point."""
    shape, m, bench = dict(point.shape), point.m, workshop.bench
    place = {"shape": shape["name"], "N": shape["N"], "K": shape["K"], "M": m}
    mark = len(telemetry.rows)
    with partial.attempt("point", **place) as attempt:
        x = Activations.make(bench, m, shape["K"])
        with SharedProducts([x.bf16_64, x.fp8_64], PRODUCT_BYTES):
            arms = workshop.arms(kit, point, x)
            lost: dict[str, str] = {}
            cells, checks, samples = measure_point(bench, arms, shape, m, telemetry.rows, lost)
        for name, reason in lost.items():
            kernel, fmt = name.rsplit("/", 1)
            note(partial, _failed(kernel, fmt, shape, m, reason))
        if failed := failures(checks):
            attempt.failed("; ".join(failed))
        window = pd.DataFrame(telemetry.rows[mark:], columns=TELEMETRY_SCHEMA.names)
        partial.append_point(point.name, cells, checks, samples, window)
    del arms, x
    free()


def stop(partial: PartialCampaign, left: int) -> None:
    """Record that the minutes are used up, and raise Unfinished."""
    words = (
        f"{left} point{'s' if left != 1 else ''} of {partial.header['rung']} are left"
        if left
        else "the profiler pass is left"
    )
    with partial.attempt("budget") as attempt:
        attempt.status, attempt.reason = "interrupted", f"the minutes of this run are used: {words}"
    raise Unfinished(f"{words}: the same command goes on")


def take_counters(
    take: Callable[..., Any],
    repo: Path,
    cubin_dir: Path,
    partial: PartialCampaign,
    budget: Budget,
    log: Log,
) -> None:
    """The profiler pass `take`, in a process of its own, on the cells measured so far."""
    took_points = "point" in budget.longest
    if took_points and budget.left() < 60 * COUNTERS_MINUTES:
        stop(partial, 0)
    with partial.attempt("counters") as attempt:
        found = take(repo, cubin_dir, partial.contents().cells, log)
        if found.refused:
            attempt.refused(found.refused)
        partial.add_counters(found.rows)


def free() -> None:
    """Give the device memory of what is no longer used back, CuPy's and torch's."""
    import cupy as cp

    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    free_memory()


def command_line(
    measuring: Callable[..., Path],
    prog: str,
    description: str | None,
    wanted: Callable[[build.KernelSource], bool],
    arguments: list[str] | None,
) -> int:
    """Measure a part of a rung by hand, as a pilot that never enters a verdict.

    `measuring`: run_campaign_<rung>; `wanted`: the sources that it needs. Status 75 when the minutes are used up and
    points are left.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--shapes", nargs="*", help="starts of shape names (default: all)")
    parser.add_argument("--ms", nargs="*", type=int, help="values of M (default: all)")
    parser.add_argument("--minutes", type=float, help="stop between two points after that long")
    parser.add_argument("--no-counters", action="store_true", help="no profiler pass")
    options = parser.parse_args(arguments)
    repo = Path.cwd()
    # The workflow's cache, because hundreds of entries take minutes to compile.
    out = repo / ".work" / "cache" / "cubins"
    sources = [s for s in build.load_sources().values() if wanted(s)]
    built = [build.compile_cubin(s, "sm_90a", out) for s in sources]
    selection = Selection(
        tuple(options.shapes) if options.shapes else None,
        tuple(options.ms) if options.ms else None,
        not options.no_counters,
    )

    def log(line: str) -> None:
        print(line, flush=True)

    try:
        print(measuring(repo, out / "sm_90a", built, log, options.minutes, "pilot", selection))
    except Unfinished as stopped:
        log(str(stopped))
        return 75
    return 0
