"""The report: one self-contained HTML page from verdicts, cells and campaigns.

`render` turns tables into plain rows and hands them to the templates beside this module; prose, column names and the
glossary live in `templates/words.json`. Same input, same bytes: the only dates on the page are those of the freezes and
the campaigns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from lab import (
    baselines,
    decode_r2,
    gemm_r2b,
    peer_gaps,
    pins,
    r1_words,
    report_r1,
    report_r2,
    report_r2b,
    sass,
    soundness,
)
from lab import figures as drawings
from lab.analysis_r1 import Analysis
from lab.analysis_r2 import Analysis as AnalysisR2
from lab.analysis_r2b import Analysis as AnalysisR2b
from lab.files import write_text
from lab.page import BLANK, Row, Tables, absent, number, span, text, with_interval
from lab.r1_words import count
from lab.rows import NOT_REACHED, not_reached
from lab.rungs import RUNGS, rung_of
from qgemm_mx.formats import DENSE_BYTES

TEMPLATES = Path(__file__).parent / "templates"

FAILED = ("MISS", "REFUTED")
HELD = ("HIT", "CONFIRMED")
UNDECIDED = ("STRADDLE", "INCONCLUSIVE", "INVALID", "DEVIATED", "TAMPERED", "EXPLORATORY")
GROUPS = (
    ("Refuted or missed", FAILED),
    ("Confirmed or hit", HELD),
    ("Undecided, invalid or exploratory", UNDECIDED),
)
NOVELTIES = ("blind", "seen", "mechanical")
M_BANDS = ((1, 1, "1"), (2, 16, "2–16"), (17, 128, "17–128"), (129, 1 << 30, "above 128"))
MEASURED_ARCH = "sm_90a"  # the others are compiled so that anybody can run the checks
NOTABLE_OPCODES = ("HGMMA", "HMMA", "UTMALDG", "UBLKCP", "LDG", "LDL", "STL")

_UNIT = {"us": "µs", "M": "tokens"}
# Roles as the page calls them.
_ROLE = {"sanity_floor": "naive baseline"}
# From here on a call is long enough for the power limit to lower the clock.
LARGE_M = 256


def render(
    out_html: str | Path,
    *,
    verdicts: pd.DataFrame,
    cells: pd.DataFrame,
    claims: Sequence[Mapping],
    campaigns: Sequence[Mapping],
    occupancy: pd.DataFrame,
    builds: Sequence[Mapping],
    scores: Mapping,
    integrity: Mapping,
    shapes: Sequence[Mapping],
    figures: Mapping[str, str],
    missing: Mapping[str, Sequence[str]] | None = None,
    protocols: Mapping[str, Mapping] | None = None,
    pinned: Mapping[str, str] | None = None,
    present: Mapping[str, str] | None = None,
    r1: Analysis | None = None,
    r2: AnalysisR2 | None = None,
    r2b: AnalysisR2b | None = None,
    recorded: Sequence[str] = (),
) -> None:
    """Write the report to `out_html` at once.

    `verdicts` and `cells` have the columns of verdicts.csv and cells.csv; `claims` are the registered claim objects;
    `campaigns` the campaign.json objects with `id`, and where known what lab.replay.described adds;
    `builds` build records, each with `sass` (entry -> opcode -> count) where it was disassembled;
    `scores` {"rows": [{forecaster, set, n_numeric, coverage50, coverage90, wis, n_yes_no, brier}]} with a coverage as
    {"k", "n", "value", "low", "high"}; `integrity` {"status": OK | TAMPERED | INVALID | UNVERIFIABLE, "head",
    "freezes": [{"seq", "frozen_utc", "claims", "access", "note"}], "problems": [{"status", "path", "reason"}]};
    `figures` what `figures.build_all` gives; `missing` what each rung
    still lacks, in words (lab.rungs.missing); `protocols` frozen protocols by the SHA-256 of their file; `pinned`
    package versions (lab.pins.read); `present` the digests `kernels_digest` and `tree_digest` of the sources now; `r1`
    `r2` and `r2b` the analyses of the campaigns of R1 and R2 that the page shows, which must be among `campaigns`;
    `recorded` the ids of all recorded campaigns.

    Raises ValueError on a timed `correctness_only` cell, a claim without verdict, or a verdict that is no verdict.
    """
    words = json.loads((TEMPLATES / "words.json").read_text(encoding="utf-8"))
    _refuse(verdicts, cells, claims, words)
    kit = Tables(
        words["columns"]
        | r1_words.words()["columns"]
        | report_r2.words()["columns"]
        | report_r2b.words()["columns"]
    )
    by_id = {c["id"]: c for c in claims}
    ordered = sorted(campaigns, key=lambda c: (c["created_utc"], c["id"]))
    newest = drawings.of_the_set(drawings.newest_cells(cells, ordered), shapes)
    near_floor = soundness.near_floor(verdicts, by_id)
    bias = _regime_bias(newest)
    notes = _figure_notes(newest)
    protocols = protocols or {}
    drawn = {
        f["key"]: f
        | _figure(f["key"], figures)
        | {"caption": " ".join([f["caption"], *notes.get(f["key"], [])])}
        for f in words["figures"]
    }
    part = report_r1.section(
        kit,
        r1,
        {c["id"]: c for c in ordered}[r1.campaign] if r1 else None,
        verdicts,
        by_id,
        lambda row, claim: _claim_row(row, claim, words),
    )
    decode = report_r2.section(kit, r2, verdicts, by_id, lambda key: _figure(key, figures))
    if decode:
        decode |= _beside(cells, ordered, decode["campaign"], decode_r2.KERNEL, peer_gaps.SCREENED)
    matrix = report_r2b.section(kit, r2b, verdicts, lambda key: _figure(key, figures))
    if matrix:
        matrix |= _beside(cells, ordered, matrix["campaign"], gemm_r2b.KERNEL, "")
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    absent_rungs = {
        name for name, shown in (("r1", part), ("r2", decode), ("r2b", matrix)) if not shown
    }
    text = (
        _environment()
        .get_template("report.html.j2")
        .render(
            words=words,
            css=Markup(style + (report_r2.style() if decode or matrix else "")),
            contents=[c for c in _CONTENTS if c[0] not in absent_rungs],
            r1=part,
            r2=decode,
            r2b=matrix,
            others=_others(integrity, ordered, recorded),
            figure3=drawn["fig3_waterfall"],
            figure5=drawn["fig5_accuracy"],
            tally=_tally(verdicts, words),
            integrity=_integrity(integrity),
            newest_line=_newest_line(ordered),
            rungs=_rungs(kit, verdicts, ordered, words, missing),
            headlines=_headlines(newest, ordered, shapes, near_floor),
            sound=soundness.answers(kit, newest, ordered, shapes, near_floor, protocols),
            constants=_constants(kit, ordered, words),
            figures=list(drawn.values()),
            in_r1=_IN_R1 if part else (),
            frozen=_frozen(kit, integrity, ordered),
            claims=_claims(kit, verdicts, by_id, words),
            forests=_forests(figures, words),
            scores=_scores(kit, scores),
            regimes=_regimes(kit, newest),
            regime_bias=bias,
            baselines=baselines.table(kit, ordered, protocols),
            occupancy=_occupancy(kit, occupancy, newest),
            builds=_builds(kit, builds),
            checks=_checks(kit, ordered),
            failed_checks=_failed_checks(kit, ordered),
            attempts_bad=_attempts(kit, ordered, ok=False),
            attempts_ok=_attempts(kit, ordered, ok=True),
            legs=_legs(kit, ordered, protocols),
            provenance=[_provenance(kit, c, pinned, present) for c in reversed(ordered)],
            claim_limits=_claim_limits(claims),
            shapes=_shapes(kit, shapes),
            columns=kit.used(),
        )
    )
    write_text(out_html, text)


#: Figures that stand in the section of R1 once there is one.
_IN_R1 = ("fig3_waterfall", "fig5_accuracy")
_CONTENTS = (
    ("rungs", "Rungs"),
    ("r1", "R1: where the throughput goes"),
    ("r2", "R2: the decode kernel"),
    ("r2b", "R2: the matrix kernel"),
    ("headline", "Headline numbers"),
    ("sound", "Is the instrument sound?"),
    ("figures", "Figures"),
    ("frozen", "How predictions were frozen"),
    ("claims", "Claims"),
    ("scores", "Scores"),
    ("regimes", "Hot and cold"),
    ("constants", "Device constants"),
    ("baselines", "Baselines"),
    ("builds", "Builds"),
    ("checks", "Checks"),
    ("attempts", "Attempts"),
    ("provenance", "Provenance"),
    ("limits", "Limits"),
    ("glossary", "Glossary"),
)


def _beside(
    cells: pd.DataFrame, ordered: Sequence[Mapping], campaign: str, kernel: str, why: str
) -> dict[str, str]:
    """Notes on a campaign: peers that an earlier one timed faster, and copies of one kernel that differ."""
    twins = {c["id"]: c for c in ordered}[campaign].get("a_a")
    gaps = peer_gaps.gaps(cells, campaign, kernel)
    return {"peers_note": peer_gaps.sentence(gaps, why), "twins_note": soundness.narrow(twins)}


def _others(integrity: Mapping, ordered: Sequence[Mapping], recorded: Sequence[str]) -> dict:
    """Recorded campaigns that the page does not show, and claims to which a campaign alone gives another verdict."""
    shown = {c["id"] for c in ordered}
    return {
        "campaigns": [name for name in recorded if name not in shown],
        "notes": list(integrity.get("notes", [])),
    }


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _refuse(
    verdicts: pd.DataFrame, cells: pd.DataFrame, claims: Sequence[Mapping], words: Mapping
) -> None:
    drawings.refuse_timed_reference(cells)
    if lost := sorted({c["id"] for c in claims} - set(verdicts["claim"])):
        raise ValueError(f"{len(lost)} registered claims have no verdict, the first is {lost[0]}")
    if odd := sorted(set(verdicts["verdict"]) - set(words["verdicts"])):
        raise ValueError(
            f"{odd[0]!r} is no verdict; the verdicts are {', '.join(words['verdicts'])}"
        )


# ---- first screen ------------------------------------------------------------------------------------------------


def _tally(verdicts: pd.DataFrame, words: Mapping) -> dict:
    novelty = [n if n in NOVELTIES else "other" for n in verdicts["novelty"]]
    counts = Counter(zip(verdicts["verdict"], novelty, strict=True))
    names = list(NOVELTIES) + (["other"] if "other" in novelty else [])
    longest = max([sum(counts[v, n] for n in names) for v in words["verdicts"]], default=0) or 1
    rows = []
    for verdict in words["verdicts"]:
        each = [counts[verdict, n] for n in names]
        bars = [
            {"novelty": n, "percent": f"{100 * c / longest:.2f}"}
            for n, c in zip(names, each, strict=True)
            if c
        ]
        rows.append({"verdict": verdict, "counts": each, "all": sum(each), "segments": bars})
    sums = [sum(r["counts"][i] for r in rows) for i in range(len(names))]
    return {"novelties": names, "rows": rows, "sums": sums, "total": len(verdicts)}


def _integrity(integrity: Mapping) -> dict:
    status = integrity["status"]
    head = integrity.get("head")
    chain = f"Head of the chain: {head[:12]}." if head else ""
    headlines = {
        "OK": "Integrity: the frozen chain is verified.",
        "UNVERIFIABLE": "Integrity: UNVERIFIABLE.",
    }
    texts = {
        "OK": f"No frozen prediction was edited, removed or frozen twice, and history shows it came first. {chain}",
        "UNVERIFIABLE": f"That predictions came before measurements cannot be proved here. {chain}",
    }
    problems = [f"{p['status']}: {p['path']}: {p['reason']}" for p in integrity.get("problems", [])]
    return {
        "status": status,
        "headline": headlines.get(status, f"Integrity: {status}."),
        "text": texts.get(status, f"The verdicts below must not be relied on. {chain}").strip(),
        "problems": problems,
    }


def _date(campaign: Mapping) -> str:
    return campaign["created_utc"][:10]


def _where(campaign: Mapping) -> str:
    device = campaign["device"]
    return f"{device['name']}, driver {device['driver']}, {_date(campaign)}"


def _newest_line(ordered: Sequence[Mapping]) -> str:
    if not ordered:
        return "No campaign has been recorded yet."
    return f"Newest campaign: {ordered[-1]['id']} ({_where(ordered[-1])})."


def _verdict_counts(verdicts: Iterable[str], words: Mapping) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]} {v}" for v in words["verdicts"] if counts[v]) or BLANK


def _rungs(
    kit: Tables,
    verdicts: pd.DataFrame,
    ordered: Sequence[Mapping],
    words: Mapping,
    missing: Mapping[str, Sequence[str]] | None,
) -> dict:
    rows = []
    for rung in RUNGS:
        here = [c for c in ordered if rung_of(c["rung"]) == rung.id]
        own = [c for c in here if c["kind"] == "campaign"]
        pilot = any(c["kind"] == "pilot" for c in here)
        newest = list({c["rung"]: c for c in own}.values())  # of each part of the rung
        judged = verdicts[verdicts["rung"] == rung.id]
        content = f"{rung.title[0].upper()}{rung.title[1:]}."
        if not own:
            lacking = (missing or {}).get(rung.id) or list(rung.needs.values())
            content += f" Missing: {'; '.join(lacking)}."
            content += " A pilot exists, which decides nothing." if pilot else ""
        rows.append(
            {
                "rung": rung.id,
                "status": "measured" if own else "NOT_RUN",
                "content": content,
                "claims": str(len(judged)),
                "counts": _verdict_counts(judged["verdict"], words),
                "campaign": "; ".join(c["id"] for c in newest) or BLANK,
                "device": own[-1]["device"]["name"] if own else BLANK,
                "date": _date(own[-1]) if own else BLANK,
            }
        )
    keys = ("rung", "status", "content", "claims", "counts", "campaign", "device", "date")
    return kit.table(keys, rows, "Rungs R0 to R3 and their newest campaigns", "No rung.")


# ---- headline numbers --------------------------------------------------------------------------------------------


def _headlines(
    newest: pd.DataFrame,
    ordered: Sequence[Mapping],
    shapes: Sequence[Mapping],
    near_floor: Mapping | None,
) -> list[dict]:
    if not ordered:
        return []
    last = ordered[-1]
    facts = [
        *_constant_facts(ordered),
        *_floor_facts(newest, shapes, near_floor),
        *_cell_facts(newest, last["device"]["l2_bytes"]),
    ]
    if not facts:
        return []
    return [
        {
            "title": _where(last),
            "facts": facts,
            "note": "Orientation only: ratios of point times of the newest campaign, regime cold_graph unless said "
            "otherwise. The judged numbers, with their intervals, stand under Claims.",
        }
    ]


def _constant_facts(ordered: Sequence[Mapping]) -> list[dict]:
    found = drawings.roofline_constants(ordered)
    if found is None:
        return []
    bandwidth, ceilings = found
    peak = " and ".join(f"{rate:.4g} TFLOP/s in {name}" for name, rate in ceilings.items())
    return [
        {
            "value": f"{bandwidth:.3g} TB/s",
            "text": "is the fastest that this device read a very large block of memory: the ceiling for any kernel "
            f"that must read its weights. For arithmetic, a sustained matrix product of 8192 cubed reached {peak}.",
        }
    ]


def _ratios(cells: pd.DataFrame, top: tuple, bottom: tuple, column: str = "time_us") -> pd.Series:
    """Per-shape ratio of a column between two (kernel, format, M, regime) selections; the index is the shape."""

    def pick(which: tuple) -> pd.Series:
        kernel, fmt, m, regime = which
        rows = cells[
            (cells["kernel"] == kernel)
            & (cells["format"] == fmt)
            & (cells["M"] == m)
            & (cells["regime"] == regime)
        ]
        return rows.set_index("shape")[column]

    return (pick(top) / pick(bottom)).dropna()


def _mean_range(ratios: pd.Series) -> tuple[str, str]:
    """Geometric mean and, in words, the range over the shapes."""
    mean = float(np.exp(np.log(ratios).mean()))
    count = f"{len(ratios)} shape{'s' if len(ratios) > 1 else ''}"
    return number(mean), f"{number(ratios.min())} to {number(ratios.max())} over {count}"


def _geomean(ratios: pd.Series) -> float:
    return float(np.exp(np.log(ratios).mean()))


def _floor_facts(
    cells: pd.DataFrame, shapes: Sequence[Mapping], near_floor: Mapping | None
) -> list[dict]:
    """How close cuBLASLt BF16 comes to the floor at M = 1: range over the large shapes, mean over all, the verdict."""
    shown = drawings.timed(cells, drawings.HEADLINE_REGIME)
    if shown.empty:
        return []
    own = shown[
        (shown["kernel"] == "cublaslt_bf16") & (shown["M"] == 1) & shown["floor_us"].notna()
    ]
    share = (own["floor_us"] / own["time_us"]).set_axis(own["shape"])
    large = share[share.index.isin([s["name"] for s in shapes if s.get("set") == "large"])]
    if large.empty:
        return []
    low, high = (f"{100 * end:.0f}" for end in (large.min(), large.max()))
    return [
        {
            "value": f"{low if low == high else f'{low} to {high}'} % of the floor",
            "text": f"is what cuBLASLt BF16 reaches for one token (M = 1) on the {len(large)} large shapes, against "
            f"just reading the same bytes; the geometric mean over all {len(share)} shapes is "
            f"{100 * _geomean(share):.0f} %. {soundness.denominator_meaning(large, large)}",
            "claim": near_floor,
        }
    ]


def _cell_facts(cells: pd.DataFrame, l2_bytes: float) -> list[dict]:
    shown = drawings.timed(cells)
    facts: list[dict] = []
    if shown.empty:
        return facts
    cold = drawings.HEADLINE_REGIME
    bf16, fp8 = ("cublaslt_bf16", "bf16", 1, cold), ("cublaslt_fp8", "fp8_e4m3", 1, cold)
    naive = ("naive_dequant", "mxfp4", 1, cold)

    def add(ratios: pd.Series, value: str, words: str) -> None:
        if len(ratios):
            mean, spread = _mean_range(ratios)
            facts.append({"value": value.format(mean), "text": words.format(spread)})

    add(
        _ratios(shown, bf16, fp8),
        "{} ×",
        "is the speed of cuBLASLt FP8 over cuBLASLt BF16 at M = 1, which moves twice the bytes (geometric mean; {}).",
    )
    at_floor = _ratios(shown, fp8, naive, "floor_us")
    add(
        at_floor,
        "{} ×",
        "is the prize measured on this device: how much faster than reading FP8 weights it is to read the same "
        "weights in MXFP4 at M = 1 (ratio of the two floors, geometric mean; {}). Byte counts alone give 1.88.",
    )
    add(
        _ratios(shown, naive, fp8),
        "{} ×",
        "the time of cuBLASLt FP8 is what it costs at M = 1 to write MXFP4 weights out as BF16 first and multiply then "
        "(naive baseline, geometric mean; {}).",
    )
    facts += _hot_fact(shown, _ratios(shown, fp8, (*fp8[:3], "hot_graph")), l2_bytes)
    add(
        _ratios(shown, (*fp8[:3], "cold_loop"), fp8),
        "{} ×",
        "is the time of cuBLASLt FP8 at M = 1 launched from a host loop, over its time in a graph replay "
        "(geometric mean; {}).",
    )
    return facts


def _hot_fact(shown: pd.DataFrame, ratios: pd.Series, l2_bytes: float) -> list[dict]:
    """Cold over hot of cuBLASLt FP8 at M = 1, apart by how much of the L2 cache one copy of the weights fills."""
    size = shown.assign(bytes=shown["N"] * shown["K"] * DENSE_BYTES["fp8_e4m3"])
    filled = size.groupby("shape")["bytes"].first().reindex(ratios.index) / l2_bytes
    groups = (
        ("take up to half of the cache", ratios[filled <= 0.5]),
        ("take more than half of it", ratios[(filled > 0.5) & (filled <= 1)]),
        ("do not fit", ratios[filled > 1]),
    )
    groups = [(name, own) for name, own in groups if len(own)]
    if not groups:
        return []
    (name, first), *rest = groups
    _, spread = _mean_range(first)
    others = [f"where they {n}, the ratio is {' ('.join(_mean_range(own))})" for n, own in rest]
    return [
        {
            "value": f"{number(_geomean(first))} ×",
            "text": "is how much faster cuBLASLt FP8 looks at M = 1 when its weights may stay in the L2 cache, on "
            f"shapes whose weights {name} (geometric mean; {spread}): the error of a benchmark that does not rotate "
            f"its weights.{''.join(f' {o[0].upper()}{o[1:]}.' for o in others)}",
        }
    ]


# ---- device constants --------------------------------------------------------------------------------------------

_CONSTANT_KEYS = ("constant", "value", "interval", "unit", "n_legs", "how", "name")
_PER_STREAM = "launch_floor_stream_"


def _constants(kit: Tables, ordered: Sequence[Mapping], words: Mapping) -> list[dict]:
    """One block per campaign that measured constants, newest first; the many launch floors of streams stand apart."""
    found = []
    for campaign in reversed(ordered):
        rows = {}
        for name, c in (campaign.get("constants") or {}).items():
            value, interval = with_interval(c["value"], c.get("ci_low"), c.get("ci_high"))
            rows[name] = {
                "constant": _in_words(name, words["constants"]),
                "value": value,
                "interval": interval,
                "unit": _UNIT.get(c["unit"], text(c["unit"])),
                "n_legs": text(c.get("n")),
                "how": text(c.get("how")),
                "name": name,
            }
        if not rows:
            continue
        stream = [row for name, row in rows.items() if name.startswith(_PER_STREAM)]
        rest = [row for name, row in rows.items() if not name.startswith(_PER_STREAM)]
        found.append(
            {
                "title": campaign["id"],
                "table": kit.table(
                    _CONSTANT_KEYS, rest, "Measured constants of the device", "No constant."
                ),
                "streams": kit.table(
                    _CONSTANT_KEYS, stream, "Empty kernel launched like each stream", ""
                ),
            }
        )
    return found


def _in_words(name: str, phrases: Sequence[Sequence[str]]) -> str:
    """The phrase of the first pattern that the whole name fits, else the name without underscores."""
    return _phrase(name, phrases) or name.replace("_", " ")


def _phrase(name: str, phrases: Sequence[Sequence[str]]) -> str | None:
    for pattern, phrase in phrases:
        if found := re.fullmatch(pattern, name):
            return found.expand(phrase)
    return None


# ---- figures -----------------------------------------------------------------------------------------------------


def _figure(key: str, figures: Mapping[str, str]) -> dict:
    wide = figures.get(key)
    if not wide:
        return {"key": key, "wide": None, "narrow": None}
    narrow = figures.get(f"{key}_narrow", wide)
    return {
        "key": key,
        "wide": Markup(drawings.themed(wide)),
        "narrow": Markup(drawings.themed(narrow)),
    }


def _figure_notes(cells: pd.DataFrame) -> dict[str, list[str]]:
    """What Figure 1 leaves out or shows oddly, and why; numbers from the cells, sentences only where they apply."""
    shown = drawings.timed(cells, drawings.HEADLINE_REGIME)
    if shown.empty:
        return {}
    notes = []
    tops = shown[shown["kernel"] == "naive_dequant"].groupby("format")["M"].max()
    short = tops[tops < tops.max()]
    if len(short):
        stop = "M = " + " or ".join(str(m) for m in sorted(set(short)))
        notes.append(
            f"Naive lines of {_format_names(short.index)} stop at {stop}: beyond it the dense product takes nearly all "
            f"of the time, so one format ({_format_names(tops[tops == tops.max()].index)}) stands for all."
        )
    group64 = shown[shown["format"] == "int4_g64"]
    if 0 < group64["shape"].nunique() < shown["shape"].nunique() and (group64["K"] % 128 > 0).all():
        where = ", ".join(
            sorted({f"{s} (K = {k})" for s, k in zip(group64["shape"], group64["K"], strict=True)})
        )
        notes.append(
            f"INT4-g64 stands for INT4-g128 on {where} only, because groups of 128 do not divide that K."
        )
    floor = drawings.floors(cells, drawings.HEADLINE_REGIME)
    wide = floor.pivot(index=["shape", "format"], columns="M", values="floor_us").dropna()
    if wide.shape[1] > 1 and len(wide):
        first, last = wide.columns.min(), wide.columns.max()
        rise = float((wide[last] / wide[first]).median()) - 1
        if rise > 0.005:
            notes.append(
                f"Dotted floors rise a little at large M (median {100 * rise:.1f} % from M = {first} to M = {last}) "
                "although they read the same bytes: heat and the power limit, after the long products timed beside "
                "them (an inference)."
            )
    return {"fig1_latency": notes}


def _format_names(formats: Iterable[str]) -> str:
    known = list(drawings.FORMAT_NAME)
    ordered = sorted(formats, key=lambda f: (known.index(f) if f in known else len(known), f))
    return ", ".join(drawings.FORMAT_NAME.get(f, f) for f in ordered)


def _forests(figures: Mapping[str, str], words: Mapping) -> list[dict]:
    found = []
    for key in sorted(k for k in figures if k.startswith("forest/") and not k.endswith("_narrow")):
        _, family, unit = key.split("/")
        unit = unit.replace("-per-", "/")
        found.append(
            _figure(key, figures)
            | {
                "family": family,
                "phrase": _phrase(family, words["families"]),
                "unit": _UNIT.get(unit, unit),
                "caption": "",
                "missing": "",
            }
        )
    return found


# ---- how predictions were frozen ---------------------------------------------------------------------------------


def _frozen(kit: Tables, integrity: Mapping, ordered: Sequence[Mapping]) -> dict:
    """The freezes, and for the newest campaign how long before it the last of them was made."""
    freezes = integrity.get("freezes") or []
    rows = [
        {
            "freeze": str(f["seq"]),
            "frozen_at": f["frozen_utc"].replace("T", " ").removesuffix("Z"),
            "claims": str(f["claims"]),
            "access": f["access"],
            "note": f["note"],
        }
        for f in freezes
    ]
    order = ""
    if freezes and ordered:
        begun = datetime.fromisoformat(ordered[-1]["created_utc"])
        times = [datetime.fromisoformat(f["frozen_utc"]) for f in freezes]
        earlier = [t for t in times if t < begun]
        order = f"{len(earlier)} of {len(times)} freezes are older than the newest campaign"
        if earlier:
            minutes = (begun - max(earlier)).total_seconds() / 60
            order += f", the last of these by {minutes:.0f} minutes"
        order += "."
        if ordered[-1]["prereg_head"] and ordered[-1]["prereg_head"] == integrity.get("head"):
            order += " The campaign itself recorded the head of the chain as it stands here."
    keys = ("freeze", "frozen_at", "claims", "access", "note")
    return {
        "table": kit.table(keys, rows, "Freezes, oldest first", "No freeze was given."),
        "order": order,
    }


# ---- claims ------------------------------------------------------------------------------------------------------

_CLAIM_KEYS = ("verdict", "claim", "observed", "band90", "band50", "q50", "chance", "unit", "kind")


def _claim_note(claim: Mapping, words: Mapping) -> str:
    """What a reader must know beside the statement: what a constant is, or which way round a ratio stands."""
    estimand = claim.get("estimand", {})
    if estimand.get("quantity") == "constant":
        return _phrase(estimand["name"] or "", words["constants"]) or ""
    if estimand.get("quantity") == "regime_ratio":
        over, under = estimand["reference_cells"][0], estimand["cells"][0]
        return f"the number is {over['regime']} over {under['regime']}, whatever the id says"
    return ""


def _claim_row(row: Mapping, claim: Mapping | None, words: Mapping) -> Row:
    claim = claim or {}
    chance = number(claim.get("probability"), 2)
    if not absent(claim.get("threshold")):
        side = {"above": "≥", "below": "≤"}.get(claim["direction"], "=")
        limit = f"{side} {number(claim['threshold'])}"
        chance = limit if chance == BLANK else f"{chance} of {limit}"
    point, interval = with_interval(row["observed"], row["ci_low"], row["ci_high"])
    observed = point if interval == BLANK else f"{point} ({interval})"
    return {
        "claim": row["claim"],
        "anchor": f"claim-{row['claim']}",
        "statement": claim.get("statement", ""),
        "aside": _claim_note(claim, words),
        "verdict": row["verdict"],
        "band90": span(row["q05"], row["q95"]),
        "band50": span(row["q25"], row["q75"]),
        "q50": number(row["q50"]),
        "chance": chance,
        "observed": observed,
        "unit": _UNIT.get(row["unit"], text(row["unit"])),
        "kind": f"{row['kind']}, {row['novelty']}",
    }


def _claims(
    kit: Tables, verdicts: pd.DataFrame, by_id: Mapping[str, Mapping], words: Mapping
) -> list[dict]:
    titles = {r.id: r.title for r in RUNGS}
    out = []
    for rung in [*titles, *sorted(set(verdicts["rung"]) - set(titles))]:
        here = verdicts[verdicts["rung"] == rung]
        here = here.assign(
            family=[by_id.get(c, {}).get("family", "unregistered") for c in here["claim"]]
        )
        here = here.sort_values(
            ["family", "claim"], key=lambda s: s.map(drawings.natural), kind="stable"
        )
        groups = []
        for title, members in GROUPS:
            rows = [
                _claim_row(r, by_id.get(r["claim"]), words)
                for r in here[here["verdict"].isin(members)].to_dict("records")
            ]
            if rows:
                caption = f"{rung}: {title.lower()}"
                groups.append({"title": title, "table": kit.table(_CLAIM_KEYS, rows, caption, "")})
        waiting = here[here["verdict"] == "NOT_RUN"]
        families = [
            _not_run_family(kit, str(family), rows, by_id, words)
            for family, rows in waiting.groupby("family", sort=True)
        ]
        out.append(
            {
                "id": rung,
                "title": titles.get(rung, "unknown rung"),
                "total": len(here),
                "groups": groups,
                "not_run": families,
                "not_run_total": len(waiting),
            }
        )
    return out


def _not_run_family(
    kit: Tables, family: str, rows: pd.DataFrame, by_id: Mapping[str, Mapping], words: Mapping
) -> dict:
    first = by_id.get(rows.iloc[0]["claim"])
    lines = []
    if first:
        lines = [
            ("Mechanism", f"{first['mechanism']['text']} ({first['mechanism']['formula']})"),
            ("Refuted by", first["refuted_by"]),
        ]
    table_rows = [_claim_row(r, by_id.get(r["claim"]), words) for r in rows.to_dict("records")]
    keys = [k for k in _CLAIM_KEYS if k != "verdict"]
    table = kit.table(keys, table_rows, f"{family}: registered, not run", "")
    return {"family": family, "count": len(rows), "lines": lines, "table": table}


def _claim_limits(claims: Sequence[Mapping]) -> list[tuple[str, str]]:
    """Each distinct does_not_show with the family that says it, and how many claims do."""
    seen: dict[str, Counter] = {}
    for claim in claims:
        seen.setdefault(claim["does_not_show"], Counter())[claim["family"]] += 1
    return [
        (line, ", ".join(f"{f}: {n}" for f, n in sorted(by.items()))) for line, by in seen.items()
    ]


# ---- scores and regimes ------------------------------------------------------------------------------------------


def _scores(kit: Tables, scores: Mapping) -> dict:
    def coverage(share: Mapping | None) -> str:
        if not share or not share["n"]:
            return BLANK
        low, high = 100 * share["low"], 100 * share["high"]
        return f"{100 * share['value']:.0f} % ({share['k']} of {share['n']}; {low:.0f} to {high:.0f} %)"

    rows = [
        {
            "forecaster": r["forecaster"],
            "set": r["set"],
            "n_numeric": str(r["n_numeric"]),
            "coverage50": coverage(r["coverage50"]),
            "coverage90": coverage(r["coverage90"]),
            "wis": number(r["wis"]),
            "n_yes_no": str(r["n_yes_no"]),
            "brier": number(r["brier"]),
        }
        for r in scores.get("rows", [])
        if r["n_numeric"] or r["n_yes_no"]
    ]
    keys = (
        "forecaster",
        "set",
        "n_numeric",
        "coverage50",
        "coverage90",
        "wis",
        "n_yes_no",
        "brier",
    )
    return kit.table(
        keys,
        rows,
        "Scores of the frozen forecasts",
        "No claim has been decided yet, so no score exists.",
    )


_REGIME_RATIOS = (
    ("cold_hot", "cold_graph", "hot_graph"),
    ("loop_graph", "cold_loop", "cold_graph"),
    ("chain_graph", "chain_pdl", "cold_graph"),
)


def _regimes(kit: Tables, cells: pd.DataFrame) -> dict:
    nothing = "No cell has been timed in two regimes yet."
    keys = ("kernel", "format", "m_range", "cold_hot", "loop_graph", "chain_graph", "cells")
    shown = drawings.timed(cells)
    if shown.empty:
        return kit.table(keys, [], "", nothing)
    index = ["kernel", "format", "shape", "N", "K", "M"]
    wide = shown.pivot(index=index, columns="regime", values="time_us").reset_index()
    rows = []
    for kernel, fmt in drawings._series(shown):
        own = wide[(wide["kernel"] == kernel) & (wide["format"] == fmt)]
        for low, high, label in M_BANDS:
            band = own[own["M"].between(low, high)]
            row = {"kernel": kernel, "format": fmt, "m_range": label}
            counts = []
            for key, over, under in _REGIME_RATIOS:
                ratios = pd.Series(dtype=float)
                if {over, under} <= set(band.columns):
                    ratios = (band[over] / band[under]).dropna()
                counts.append(len(ratios))
                if len(ratios):
                    mean = number(float(np.exp(np.log(ratios).mean())))
                    row[key] = f"{mean} ({number(ratios.min())} to {number(ratios.max())})"
            if any(counts):
                rows.append(row | {"cells": str(max(counts))})
    return kit.table(
        keys,
        rows,
        "Ratios of times between regimes (no unit; geometric mean, lowest to highest)",
        nothing,
    )


def _regime_bias(cells: pd.DataFrame) -> dict | None:
    """Ratios below 1, where neither a cache nor a launch can be the cause; None where there is none.

    `below` of `of` ratios, the `lowest` and its place in words; `large` is the largest deviation in percent at M of
    LARGE_M and more, or None.
    """
    shown = drawings.timed(cells)
    if shown.empty:
        return None
    wide = shown.pivot(index=["kernel", "format", "shape", "M"], columns="regime", values="time_us")
    pairs = [
        (name, over, under)
        for name, over, under in (
            ("cold / hot", "cold_graph", "hot_graph"),
            ("looped / graphed", "cold_loop", "cold_graph"),
        )
        if {over, under} <= set(wide.columns)
    ]
    found = [(wide[over] / wide[under]).dropna().rename(name) for name, over, under in pairs]
    ratios = pd.concat({r.name: r for r in found}, names=["which"]) if found else pd.Series()
    below = ratios[ratios < 1]
    if below.empty:
        return None
    which, kernel, fmt, shape, m = below.idxmin()
    large = below[below.index.get_level_values("M") >= LARGE_M]
    return {
        "below": len(below),
        "of": len(ratios),
        "lowest": number(below.min()),
        "where": f"{which}, {kernel} in {drawings.FORMAT_NAME.get(fmt, fmt)}, {shape}, M = {m}",
        "large_m": LARGE_M,
        "large": f"{100 * (1 - large.min()):.0f} %" if len(large) else None,
    }


# ---- builds, checks, attempts ------------------------------------------------------------------------------------


def _occupancy(kit: Tables, occupancy: pd.DataFrame, newest: pd.DataFrame) -> dict:
    """Two tables: `timed`, the kernels that carry a time on the architecture measured, and `rest`."""
    shown = set(drawings.timed(newest)["kernel"]) if len(newest) else set()
    keys = ("kernel", "entry", "arch", "threads", "registers", "spill_bytes", "smem_static_bytes")
    keys += ("smem_dynamic_bytes", "blocks_per_sm", "warps_per_sm", "occupancy", "limiter")
    timed, rest = [], []
    for record in occupancy.to_dict("records"):
        row = {k: text(record.get(k)) for k in keys}
        row["occupancy"] = f"{100 * record['occupancy']:.0f} %"
        measured = record["arch"] == MEASURED_ARCH and record["kernel"] in shown
        (timed if measured else rest).append(row)
    return {
        "timed": kit.table(
            keys,
            timed,
            f"Occupancy computed from the compiled code: timed kernels, {MEASURED_ARCH}",
            "No timed kernel has an occupancy yet." if rest else "No occupancy table was made.",
        ),
        "rest": kit.table(
            keys, rest, "Occupancy of helpers, of untimed kernels and of other architectures", ""
        ),
    }


def _builds(kit: Tables, builds: Sequence[Mapping]) -> dict:
    rows = []
    for build in builds:
        for entry in build["entries"]:
            counts = (build.get("sass") or {}).get(entry["entry"])
            rows.append(
                {
                    "kernel": build["name"],
                    "entry": entry["entry"],
                    "arch": build["architecture"],
                    "role": _ROLE.get(build["role"], build["role"]),
                    "registers": str(entry["registers"]),
                    "barriers": str(entry["barriers"]),
                    "stack_bytes": str(entry["stack_bytes"]),
                    "spill_bytes": str(entry["spill_store_bytes"] + entry["spill_load_bytes"]),
                    "smem_static_bytes": str(entry["smem_static_bytes"]),
                    "sass": _sass(counts),
                    "cubin": build["cubin_sha256"][:12],
                    "nvcc": build["nvcc_version"],
                }
            )
    keys = (
        "kernel",
        "entry",
        "arch",
        "role",
        "registers",
        "barriers",
        "stack_bytes",
        "spill_bytes",
    )
    keys += ("smem_static_bytes", "sass", "cubin", "nvcc")
    return kit.table(
        keys,
        rows,
        "What the compiler made, one row per entry function",
        "No build record was given.",
    )


def _sass(counts: Mapping[str, int] | None) -> str:
    if not counts:
        return BLANK
    named = [f"{sass.count(counts, opcode)} {opcode}" for opcode in NOTABLE_OPCODES]
    return f"{sum(counts.values())} instructions: " + ", ".join(
        n for n in named if not n.startswith("0 ")
    )


def _checks(kit: Tables, ordered: Sequence[Mapping]) -> dict:
    groups: dict[tuple[str, str, str], list[Mapping]] = {}
    for campaign in ordered:
        for check in campaign["checks"]:
            groups.setdefault((check["kernel"], check["format"], check["name"]), []).append(check)
    rows = []
    for (kernel, fmt, name), members in sorted(groups.items()):
        shares = [
            c["measured"] / c["limit"] for c in members if not absent(c["measured"]) and c["limit"]
        ]
        passed = sum(bool(c["passed"]) for c in members)
        rows.append(
            {
                "kernel": kernel,
                "format": fmt,
                "check": name,
                "passed": f"{passed} of {len(members)}",
                "worst": number(max(shares)) if shares else BLANK,
            }
        )
    keys = ("kernel", "format", "check", "passed", "worst")
    return kit.table(
        keys, rows, "Checks by kernel and format, all campaigns", "No check has been recorded yet."
    )


def _failed_checks(kit: Tables, ordered: Sequence[Mapping]) -> dict:
    rows = [
        {
            "kernel": c["kernel"],
            "format": c["format"],
            "what": f"{c['shape']} {c['N']}×{c['K']} M={c['M']}",
            "check": c["name"],
            "worst": f"{number(c['measured'])} / {number(c['limit'])}",
            "detail": text(c["detail"]),
            "campaign": campaign["id"],
        }
        for campaign in ordered
        for c in campaign["checks"]
        if not c["passed"]
    ]
    keys = ("kernel", "format", "what", "check", "worst", "detail", "campaign")
    return kit.table(keys, rows, "Every check that failed", "No check failed.")


def _attempts(kit: Tables, ordered: Sequence[Mapping], *, ok: bool) -> dict:
    rows, tried = [], 0
    for campaign in ordered:
        lost = not_reached(campaign["attempts"])
        for a in campaign["attempts"]:
            tried += 1
            if (a["status"] == "ok") != ok or a["reason"] == NOT_REACHED:
                continue
            cell = [text(a.get(k)) for k in ("kernel", "format", "shape") if not absent(a.get(k))]
            cell += [f"M={a['M']}"] if not absent(a.get("M")) else []
            cell += [a["regime"]] if not absent(a.get("regime")) else []
            rows.append(
                {
                    "what": " ".join([text(a.get("stage")), *cell]),
                    "status": a["status"],
                    "reason": text(a["reason"]),
                    "started": a["started_utc"],
                    "seconds": number(a["seconds"]),
                    "campaign": campaign["id"],
                }
            )
        if lost and not ok:  # many, of one reason and moment
            rows.append(
                {
                    "what": f"{count(len(lost), 'point')} of {', '.join(dict.fromkeys(p[0] for p in lost))}",
                    "status": "refused",
                    "reason": NOT_REACHED,
                    "seconds": BLANK,
                    "started": BLANK,
                    "campaign": campaign["id"],
                }
            )
    keys = ("status", "what", "reason", "seconds", "started", "campaign")
    if ok:
        return kit.table(keys, rows, "Attempts with status ok", "No attempt has gone well yet.")
    nothing = (
        f"All {tried} recorded attempts went well."
        if tried
        else "No attempt has been recorded yet."
    )
    return kit.table(keys, rows, "Every attempt that did not end well", nothing)


def _legs(kit: Tables, ordered: Sequence[Mapping], protocols: Mapping[str, Mapping]) -> dict:
    rows = []
    for campaign in ordered:
        legs = campaign.get("legs")
        if legs:
            share = 100 * legs["dropped"] / legs["total"] if legs["total"] else 0.0
            reasons = ", ".join(
                f"{n} for {reason}" for reason, n in sorted(legs["reasons"].items())
            )
            row = {"legs": str(legs["total"]), "dropped": f"{legs['dropped']} ({share:.2g} %)"}
            frozen = soundness.drop_reasons(campaign, protocols) or BLANK
            row |= {"reason": reasons or "none dropped", "drop_reasons": frozen}
            rows.append(row | {"campaign": campaign["id"]})
    keys = ("campaign", "legs", "dropped", "reason", "drop_reasons")
    return kit.table(
        keys, rows, "Timed legs and those dropped by the frozen rule", "No leg counts were given."
    )


# ---- provenance --------------------------------------------------------------------------------------------------


def _provenance(
    kit: Tables,
    campaign: Mapping,
    pinned: Mapping[str, str] | None,
    present: Mapping[str, str] | None,
) -> dict:
    source = campaign["source"]
    facts: dict[str, Any] = {f"device {k}": v for k, v in campaign["device"].items()}
    for name, summary in (campaign.get("telemetry") or {}).items():
        values = " / ".join(number(summary[k], 4) for k in ("min", "median", "max"))
        facts[f"{name} during legs (min / median / max)"] = values
    facts |= {
        "measured": campaign["created_utc"],
        "kind": campaign["kind"],
        "commit": source["commit"],
        "dirty working tree": source["dirty"],
        "source tree digest": source["tree_digest"],
        "head of the frozen chain": campaign["prereg_head"],
        "protocol SHA-256": campaign["protocol_sha256"],
        "seed": campaign["seed"],
        "settings untouched": campaign["settings_untouched"],
    }
    facts |= {f"version of {k}": v for k, v in campaign["software"].items()}
    facts |= _changed_since(source, present or {})
    rows = [{"fact": k.replace("_", " "), "recorded": text(v)} for k, v in facts.items()]
    title = f"{campaign['id']} ({campaign['rung']}, {campaign['kind']})"
    return {
        "title": title,
        "facts": kit.table(("fact", "recorded"), rows, f"Provenance of {campaign['id']}", ""),
        "pins": _against_pins(kit, campaign["software"], pinned or {}),
    }


def _changed_since(source: Mapping, present: Mapping[str, str]) -> dict[str, str]:
    """Whether what was measured is what lies here now, in words; nothing where a digest is not known."""
    questions = (
        (
            "kernels_digest",
            "kernel sources since",
            "changed: the kernels here are not those measured",
        ),
        ("tree_digest", "all sources since", "changed; this counts the report's own code too"),
    )
    return {
        fact: "the same as measured" if source[name] == present[name] else otherwise
        for name, fact, otherwise in questions
        if source.get(name) and present.get(name)
    }


def _against_pins(kit: Tables, software: Mapping[str, str], pinned: Mapping[str, str]) -> dict:
    rows = []
    for name, version in software.items():
        pin = pins.pin_of(name, pinned)
        if pin is not None:
            same = "yes" if pin == version else "no"
            rows.append({"package": name, "version": version, "pin": pin, "same": same})
    return kit.table(
        ("package", "version", "pin", "same"),
        rows,
        "Recorded versions against the pins, where both are known",
        "",
    )


def _shapes(kit: Tables, shapes: Sequence[Mapping]) -> dict:
    rows = [
        {
            "name": s["name"],
            "n": str(s["N"]),
            "k": str(s["K"]),
            "shape_set": text(s.get("set")),
            "why": text(s["why"]),
        }
        for s in shapes
    ]
    return kit.table(
        ("name", "n", "k", "shape_set", "why"),
        rows,
        "Weight matrices, N rows by K columns",
        "No shape.",
    )
