"""The R0 campaign: constants, floors and baselines over all frozen shapes and M, as the frozen protocol says.

One point is a (shape, M). At a point every arm is tuned, checked, captured, timed in interleaved blocks with an A/A
leg, and checked again; then the point is appended to the journal, so Ctrl-C or a crash loses at most one point. This
module reads the protocol and the shapes, never a prediction: an audit hook refuses the open of one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lab import constants, counters, device, occupancy, records, source
from lab.arms import Arm, CublasLtArm, StreamArm, stream_launches, tune_stream
from lab.bench import Bench, forbid_predictions
from lab.fp4_arms import NaiveDequantArm, ReferenceArm, probe_checks
from lab.journal import PartialCampaign
from lab.operands import (
    decode_activations,
    make_activations,
    make_weights,
)
from lab.protocol import (
    SLOPE,
    block_order,
    drop_reason,
    file_of,
    is_large,
    min_nodes,
    planned_blocks,
    point_seed,
    regimes_at,
    shuffled,
    takes_part,
    too_wide,
    twin_kernels,
)
from lab.rows import INVALID_BY_DESIGN, CellRow, CheckRow, Tuning
from lab.samples import DUPLICATE_SUFFIX, LOOPED, SAMPLES_SCHEMA, TELEMETRY_SCHEMA
from lab.timing import Leg, Timer, nodes_for
from qgemm_mx.build import BuildRecord
from qgemm_mx.formats import FORMATS, weight_bytes
from qgemm_mx.probes import CheckResult

FLOOR_FORMATS = ("bf16", "fp8_e4m3", "mxfp4", "nvfp4", "int4_g128")
HOT = "hot_graph"
PROBES = "probes"
#: At large M the naive path is a dense product and a constant: one format shows it, and the nine minutes are kept.
NAIVE_AT_LARGE_M = ("mxfp4",)


@dataclass(frozen=True)
class Selection:
    """What to measure: shapes by name, the M values, and whether profiler counters are taken."""

    shapes: tuple[str, ...] | None = None
    ms: tuple[int, ...] | None = None
    with_counters: bool = True


@dataclass
class TimedArm:
    """An arm with its captured graphs and the copy that its last call used."""

    arm: Arm
    name: str
    graphs: dict[str, tuple[Any, Any, int]] = field(default_factory=dict)
    last_copy: int = 0

    @property
    def original(self) -> bool:
        """Whether this is no A/A duplicate."""
        return not self.name.endswith(DUPLICATE_SUFFIX)

    @property
    def foreign(self) -> bool:
        """Whether this is a peer: code of others, which may raise without ending the campaign."""
        return self.arm.role == "peer"

    @property
    def wrong(self) -> bool:
        """Whether the arm is wrong by design, and says so with `claims_right`."""
        return not getattr(self.arm, "claims_right", True)

    def takes_part(self, protocol: dict[str, Any], shape: str, m: int, regime: str) -> bool:
        """Whether the protocol times this arm in a regime at a point; a duplicate in the headline alone."""
        if not self.original and regime != protocol["regimes"]["headline"]:
            return False
        return takes_part(protocol, (self.arm.kernel, self.arm.role), self.wrong, shape, m, regime)

    def capture(self, timer: Timer, regime: str, min_nodes: int) -> None:
        """Capture the N and 2N graphs of a graph regime; an arm may have a launch of its own for a regime."""
        launch = getattr(self.arm, "launches", {}).get(regime, self.arm.launch)
        copies = 1 if regime == HOT else self.arm.copies
        nodes = nodes_for(copies, min_nodes)
        pair = (timer.capture(launch, copies, nodes), timer.capture(launch, copies, 2 * nodes))
        self.graphs[regime] = (*pair, nodes)

    def leg(self, timer: Timer, regime: str, min_nodes: int) -> Leg:
        """Take one leg of a regime."""
        if regime == LOOPED:
            self.last_copy = (min_nodes - 1) % self.arm.copies
            return timer.loop_leg(self.arm.launch, self.arm.copies, min_nodes)
        graph_n, graph_2n, nodes = self.graphs[regime]
        self.last_copy = 0 if regime == HOT else (2 * nodes - 1) % self.arm.copies
        return timer.graph_leg(graph_n, graph_2n, nodes, warm=regime == HOT)


def run_blocks(
    bench: Bench,
    arms: list[TimedArm],
    regime: str,
    blocks: Iterable[list[str]],
    first: int,
    extension: bool,
    rows: list,
    nodes: int,
) -> list[dict[str, Any]]:
    """Take the legs of blocks in their order, with at least `nodes` calls in the short replay or the loop.

    Returns sample rows without the cell's columns.
    """
    by_name = {arm.name: arm for arm in arms}
    legs = []
    for block, order in enumerate(blocks, first):
        for position, name in enumerate(order):
            leg = by_name[name].leg(bench.timer, regime, nodes)
            legs.append((name, block, position, leg))
    found = []
    for name, block, position, leg in legs:
        reason = drop_reason(bench.protocol, rows, leg.start_ns, leg.end_ns)
        if reason is None and not leg.time_us > 0:
            reason = SLOPE
        found.append(
            {
                "arm": name,
                "regime": regime,
                "block": block,
                "position": position,
                "extension": extension,
                "nodes": leg.nodes,
                "t_n_us": leg.t_n_us,
                "t_2n_us": leg.t_2n_us,
                "time_us": leg.time_us,
                "intercept_us": leg.intercept_us,
                "start_ns": leg.start_ns,
                "end_ns": leg.end_ns,
                "dropped": reason is not None,
                "drop_reason": reason,
            }
        )
    return found


def time_point(
    bench: Bench, arms: list[TimedArm], shape: dict, m: int, rows: list
) -> list[dict[str, Any]]:
    """All legs of a point: headline blocks with the frozen extension, then the other regimes.

    The width of an arm that is wrong by design never extends a point.
    """
    protocol, name = bench.protocol, shape["name"]
    half_width = protocol["blocks"]["extension"]["half_width"]
    nodes = min_nodes(protocol, m)
    wrong = {a.name for a in arms if a.wrong}
    legs: list[dict[str, Any]] = []
    for regime in regimes_at(protocol, name, m):
        taking = [a for a in arms if a.takes_part(protocol, name, m, regime)]
        if not taking:
            continue
        for arm in taking:
            if regime != LOOPED:
                arm.capture(bench.timer, regime, nodes)
            arm.leg(bench.timer, regime, nodes)  # warm-up, thrown away
        n = planned_blocks(protocol, m, regime)
        order = block_order(protocol, [a.name for a in taking], name, m, regime)
        taken = run_blocks(bench, taking, regime, order[:n], 0, False, rows, nodes)
        extension = order[n:]  # of the headline alone
        if extension and too_wide([x for x in taken if x["arm"] not in wrong], half_width):
            taken += run_blocks(bench, taking, regime, extension, n, True, rows, nodes)
        legs += taken
        for arm in taking:
            arm.graphs.pop(regime, None)
    return legs


def check_before(
    bench: Bench, arms: list[TimedArm], shape: dict, m: int, lost: dict[str, str]
) -> dict[str, list[CheckResult]]:
    """Run the correctness gate of every arm. A peer that raises, here or in a rehearsal of its legs, goes to `lost`."""
    found = {}
    for arm in arms:
        try:
            found[arm.name] = arm.arm.check(0, "before")
            if arm.foreign and all(c.passed for c in found[arm.name]):
                rehearse(bench, arm, shape, m)
        except Exception as error:
            if not arm.foreign:
                raise
            found.pop(arm.name, None)
            lost[arm.name] = f"{type(error).__name__}: {error}"[:300]
    return found


def rehearse(bench: Bench, arm: TimedArm, shape: dict, m: int) -> None:
    """One thrown-away leg of every regime: what cannot be captured must not be met in the middle of a block."""
    nodes = min_nodes(bench.protocol, m)
    for regime in regimes_at(bench.protocol, shape["name"], m):
        if arm.takes_part(bench.protocol, shape["name"], m, regime):
            if regime != LOOPED:
                arm.capture(bench.timer, regime, nodes)
            arm.leg(bench.timer, regime, nodes)
    arm.graphs.clear()


def check_after(arms: list[TimedArm]) -> dict[str, list[CheckResult]]:
    """Run the gate again on what the last timed call left (A/A duplicates share their original's)."""
    found = {}
    for arm in arms:
        if arm.original:
            try:
                found[arm.name] = arm.arm.check(arm.last_copy, "after")
            except Exception as error:
                if not arm.foreign:
                    raise
                words = f"{type(error).__name__}: {error}"[:300]
                found[arm.name] = [CheckResult("recheck_after", False, float("inf"), 1.0, words)]
    return found


def failures(checks: Iterable[CheckRow]) -> list[str]:
    """Failed checks in words, each once."""
    return sorted({f"{c.kernel}/{c.format} {c.shape} {c.name}" for c in checks if not c.passed})


def take_probes(
    partial: PartialCampaign,
    of: str,
    take: Callable[[], list[CheckRow]],
    log: Callable[[str], None],
) -> None:
    """The structured probes of `of`, once a campaign: recorded whether they hold or not, and counted in the log."""
    if PROBES in partial.finished:
        return
    with partial.attempt(PROBES) as attempt:
        checks = take()
        if wrong := failures(checks):
            attempt.failed("; ".join(wrong))
        partial.append_point(PROBES, [], checks)
    log(f"{of}: {len(checks)} structured probes on the device, {len(wrong)} failed")


def measure_point(
    bench: Bench,
    arms: list[Arm],
    shape: dict,
    m: int,
    rows: list,
    lost: dict[str, str] | None = None,
) -> tuple[list, list, pd.DataFrame]:
    """Gate, time and gate again the arms of a point. Returns cell rows, check rows and samples.

    A peer that raises before its first leg is put into `lost` with its reason, and the point goes on without it.
    """
    timed = [TimedArm(arm, f"{arm.kernel}/{arm.format}") for arm in arms]
    before = check_before(bench, timed, shape, m, {} if lost is None else lost)
    timed = [a for a in timed if a.name in before]
    passing = [a for a in timed if all(c.passed for c in before[a.name])]
    twins = [a for a in passing if a.arm.kernel in twin_kernels(bench.protocol)]
    passing += [TimedArm(a.arm, a.name + DUPLICATE_SUFFIX) for a in twins]
    legs = time_point(bench, passing, shape, m, rows) if passing else []
    after = check_after(passing)

    place = {"shape": shape["name"], "N": shape["N"], "K": shape["K"], "M": m}
    checks, good = [], set()
    for arm in timed:
        results = before[arm.name] + after.get(arm.name, [])
        checks += [
            CheckRow(arm.arm.kernel, arm.arm.format, **place, **vars(result)) for result in results
        ]
        if all(result.passed for result in results):
            good.add(arm.name)
    cells = [
        CellRow(
            kernel=arm.arm.kernel,
            role=arm.arm.role,
            format=arm.arm.format,
            **place,
            regime=regime,
            weight_bytes=arm.arm.weight_bytes,
            correctness=_correctness(arm, arm.name in good),
            tuning=Tuning(**arm.arm.tuning) if arm.arm.tuning else None,
        )
        for arm in timed
        for regime in regimes_at(bench.protocol, shape["name"], m)
        if arm.takes_part(bench.protocol, shape["name"], m, regime)
    ]
    return cells, checks, sample_frame(legs, timed, good, place)


def _correctness(arm: TimedArm, good: bool) -> str:
    if not good:
        return "failed"
    return INVALID_BY_DESIGN if arm.wrong else "passed"


def sample_frame(
    legs: list[dict], timed: list[TimedArm], good: set[str], place: dict
) -> pd.DataFrame:
    """Legs of correct arms as the samples table; a wrong arm keeps its checks and loses its times."""
    by_name = {a.name: a.arm for a in timed}
    rows = []
    for leg in legs:
        original = leg["arm"].removesuffix(DUPLICATE_SUFFIX)
        if original in good:
            arm = by_name[original]
            rows.append(
                {"kernel": arm.kernel, "format": arm.format, "role": arm.role, **place, **leg}
            )
    frame = pd.DataFrame(rows, columns=SAMPLES_SCHEMA.names)
    # An arm that failed its recheck leaves gaps: places in a block stay those of the run.
    return frame


@dataclass
class ShapeOperands:
    """Weights of one shape in all formats, with the tuned streams: shared by all M."""

    weights: dict[str, Any]
    streams: list[StreamArm]


def prepare_shape(bench: Bench, shape: dict) -> ShapeOperands:
    """Random weights of a shape, fresh for this run, and the fastest stream for each of their sizes."""
    weights = {}
    for fmt in formats_of(shape):
        n, k = shape["N"], shape["K"]
        weights[fmt] = make_weights(bench.random, fmt, n, k, bench.copies(weight_bytes(fmt, n, k)))
    sms = bench.probe["sm_count"]
    streams = [
        tune_stream(bench.timer, bench.modules, w, bench.protocol, sms) for w in weights.values()
    ]
    return ShapeOperands(weights, streams)


def formats_of(shape: dict) -> list[str]:
    """Formats that a shape is measured in: INT4 with groups of 64 where K is no multiple of 128."""
    fits = shape["K"] % 128 == 0
    return [f if f != "int4_g128" or fits else "int4_g64" for f in FLOOR_FORMATS]


def arms_at(bench: Bench, operands: ShapeOperands, shape: dict, m: int) -> list[Arm]:
    """The arms of a point: streams of every format, then the dense baselines."""
    x_bf16, x_fp8 = make_activations(bench.random, m, shape["K"])
    baselines = []
    for fmt, x in (("bf16", x_bf16), ("fp8_e4m3", x_fp8)):
        arm = CublasLtArm(
            operands.weights[fmt], x, decode_activations(x), bench.lt, bench.stream, bench.protocol
        )
        arm.tune(bench.timer)
        baselines.append(arm)
    large = is_large(bench.protocol, m)
    naive = [
        NaiveDequantArm(operands.weights[f], baselines[0], bench.modules, bench.stream)
        for f in operands.weights
        if f in (NAIVE_AT_LARGE_M if large else FORMATS)
    ]
    return [*operands.streams, *baselines, *naive]


def reference_point(
    bench: Bench, operands: ShapeOperands, arms: list[Arm], shape: dict, m: int
) -> tuple[list, list]:
    """Cell and check rows of the reference kernel at a point, on the operands of the timed arms. It is never timed."""
    dense = next(a for a in arms if a.kernel == "cublaslt_bf16")
    place = {"shape": shape["name"], "N": shape["N"], "K": shape["K"], "M": m}
    cells, checks = [], []
    for fmt in operands.weights:
        if fmt not in FORMATS:
            continue
        cubin = bench.modules.folder / "reference.cubin"
        arm = ReferenceArm(operands.weights[fmt], dense.x, dense.x64, bench.protocol, cubin)
        result = arm.check()
        checks.append(CheckRow(arm.kernel, fmt, **place, **vars(result)))
        cells.append(
            CellRow(
                kernel=arm.kernel,
                role=arm.role,
                format=fmt,
                **place,
                regime=bench.protocol["regimes"]["headline"],
                weight_bytes=operands.weights[fmt].copy_bytes,
                correctness="passed" if result.passed else "failed",
            )
        )
    return cells, checks


def header(
    rung: str, kind: str, repo: Path, bench: Bench, builds: list[dict], measured_source: dict
) -> dict[str, Any]:
    """The identity of a campaign: device, software, source, protocol, cubins."""
    protocol_bytes = (repo / file_of(rung)).read_bytes()
    manifest_lines = [
        x for x in (repo / "prereg" / "manifest.jsonl").read_bytes().split(b"\n") if x
    ]
    return {
        "rung": rung,
        "kind": kind,
        "device": bench.probe,
        "software": device.software_versions(),
        "source": measured_source,
        "prereg_head": hashlib.sha256(manifest_lines[-1]).hexdigest() if manifest_lines else None,
        "protocol_sha256": hashlib.sha256(protocol_bytes).hexdigest(),
        "seed": int(bench.protocol["seed"]),
        "cubins": builds,
    }


def run_campaign(
    rung: str,
    repo: Path,
    cubin_dir: Path,
    builds: list[BuildRecord],
    log: Callable[[str], None],
    kind: str = "campaign",
    selection: Selection = Selection(),  # noqa: B008 - frozen
    partial_root: Path | None = None,
) -> Path:
    """Measure a campaign, or go on with an interrupted one, and write it under data/campaigns. Returns its folder.

    `builds`: the build records of the cubins in `cubin_dir`, all of one architecture.
    """
    measured_source = source.describe(
        repo
    )  # hashes every source file, so it goes before the firewall
    forbid_predictions()
    protocol = json.loads((repo / file_of(rung)).read_text(encoding="utf-8"))
    frozen = json.loads((repo / "prereg" / "shapes.json").read_text(encoding="utf-8"))
    seed = int(protocol["seed"])
    bench = Bench.open(protocol, cubin_dir, seed)
    if bench.probe["other_processes"]:
        log(f"warning: {bench.probe['other_processes']} other processes use {bench.probe['name']}")
    shapes = [
        s for s in frozen["shapes"] if selection.shapes is None or s["name"] in selection.shapes
    ]
    ms = [
        m
        for m in (*frozen["M"], *frozen["M_amendment_1"])
        if selection.ms is None or m in selection.ms
    ]
    root = partial_root or repo / ".work" / "partial"
    rows = [record.campaign_row() for record in builds]
    identity = header(rung, kind, repo, bench, rows, measured_source)
    with PartialCampaign.open(root, identity) as partial:
        telemetry = device.Telemetry(protocol["telemetry"]["period_ms"])
        with telemetry:
            check_occupancy(bench, partial, builds, log)
            _measure_all(bench, partial, shapes, ms, telemetry, log)
            if selection.with_counters and not partial.counters:
                with partial.attempt("counters") as attempt:
                    found = counters.take(repo, cubin_dir, log)
                    if found.refused:
                        attempt.refused(found.refused)
                    partial.add_counters(found.rows)
        folder = records.finalise(partial, repo / "data")
    log(f"campaign {folder.name} written")
    return folder


def check_occupancy(
    bench: Bench, partial: PartialCampaign, builds: list[BuildRecord], log: Callable
) -> None:
    """Hold the computed occupancy against the driver's answer; a difference is a failed attempt in the record."""
    table = occupancy.table(builds, stream_launches(bench.protocol, bench.probe["sm_count"]))
    with partial.attempt("occupancy") as attempt:
        driver = {
            (row.entry, row.arch, row.threads, row.smem_dynamic_bytes): bench.modules[
                row.kernel
            ].driver_blocks_per_sm(row.entry, row.threads, row.smem_dynamic_bytes)
            for row in table.itertuples()
        }
        if problems := occupancy.compare(table, driver):
            attempt.failed("; ".join(problems))
    log(f"occupancy: {len(table)} launches, {len(problems)} differ from the driver's answer")


def _measure_all(
    bench: Bench,
    partial: PartialCampaign,
    shapes: list,
    ms: list,
    telemetry: device.Telemetry,
    log: Callable,
) -> None:
    import cupy as cp

    protocol = bench.protocol
    if not partial.constants:
        log(f"{bench.probe['name']}, driver {bench.probe['driver']}: device constants")
        with partial.attempt("constants"):
            found = constants.measure(
                bench.timer,
                bench.modules,
                bench.random,
                bench.lt,
                protocol,
                bench.probe["sm_count"],
            )
            partial.add_constants(found)
    reference = bench.modules.folder / "reference.cubin"
    take_probes(partial, "reference kernel", lambda: probe_checks(reference), log)
    total, done, started, taken = (
        len(shapes) * len(ms),
        len(partial.finished) - 1,
        time.monotonic(),
        0,
    )
    for shape in shuffled(shapes, point_seed(protocol, "shapes")):
        todo = [m for m in ms if f"{shape['name']}/M{m}" not in partial.finished]
        if not todo:
            continue
        operands = prepare_shape(bench, shape)
        stream = next(s for s in operands.streams if s.format == "mxfp4")
        floor = constants.launch_floor(bench.timer, bench.modules, stream, shape["name"])
        if not floor.keys() & partial.constants.keys():
            partial.add_constants(floor)
        for m in shuffled(todo, point_seed(protocol, shape["name"], "M")):
            mark = len(telemetry.rows)
            with partial.attempt(
                "point", shape=shape["name"], N=shape["N"], K=shape["K"], M=m
            ) as attempt:
                arms = arms_at(bench, operands, shape, m)
                cells, checks, samples = measure_point(bench, arms, shape, m, telemetry.rows)
                more_cells, more_checks = reference_point(bench, operands, arms, shape, m)
                cells, checks = cells + more_cells, checks + more_checks
                if failed := failures(checks):
                    attempt.failed("; ".join(failed))
                window = pd.DataFrame(telemetry.rows[mark:], columns=TELEMETRY_SCHEMA.names)
                partial.append_point(f"{shape['name']}/M{m}", cells, checks, samples, window)
            del arms
            cp.get_default_memory_pool().free_all_blocks()
            done, taken = done + 1, taken + 1
            left = (time.monotonic() - started) / taken * (total - done)
            log(
                f"{done}/{total} {shape['name']} M={m}: {total - done} points left, about {left:.0f} s"
            )
        del operands
        cp.get_default_memory_pool().free_all_blocks()


def main(arguments: list[str] | None = None) -> int:
    """Measure a part of R0 by hand, as a pilot that never enters a verdict: `python -m lab.measure --ms 1 16`."""
    import argparse

    from qgemm_mx import build

    parser = argparse.ArgumentParser(prog="python -m lab.measure", description=main.__doc__)
    parser.add_argument("--shapes", nargs="*", help="names of prereg/shapes.json (default: all)")
    parser.add_argument("--ms", nargs="*", type=int, help="values of M (default: all)")
    parser.add_argument("--no-counters", action="store_true", help="no profiler pass")
    options = parser.parse_args(arguments)
    repo = Path.cwd()
    out = repo / ".work" / "pilot"
    sources = [s for s in build.load_sources().values() if s.role != "testbed"]
    built = [build.compile_cubin(source, "sm_90a", out) for source in sources]
    selection = Selection(
        tuple(options.shapes) if options.shapes else None,
        tuple(options.ms) if options.ms else None,
        not options.no_counters,
    )
    folder = run_campaign(
        "R0", repo, out / "sm_90a", built, lambda s: print(s, flush=True), "pilot", selection
    )
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
