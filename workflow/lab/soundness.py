"""Is the instrument sound? Short questions, each answered by the newest campaign that recorded the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from lab import figures as drawings
from lab.page import BLANK, Tables, absent, number, text, with_interval

_DRAM, _DRAM_RATIO = "dram__bytes_read.sum", "dram_bytes_over_weight_bytes"
# Up to here reading the weights, not arithmetic, sets the time of BF16 on every large shape.
SMALL_M = 16
_EXACT = ("probe_", "decode_bits", "all_codes")
#: The frozen claim about the denominator.
NEAR_FLOOR = "r0.harness.bf16_near_floor"


def near_floor(verdicts: pd.DataFrame, by_id: Mapping[str, Mapping]) -> dict | None:
    """What became of the frozen claim about the floor: `id`, `verdict`, and both numbers in `words`; None undecided."""
    rows = verdicts[verdicts["claim"] == NEAR_FLOOR]
    if rows.empty or NEAR_FLOOR not in by_id or absent(rows.iloc[0]["observed"]):
        return None
    row = rows.iloc[0]
    point, interval = with_interval(row["observed"], row["ci_low"], row["ci_high"])
    return {
        "id": NEAR_FLOOR,
        "verdict": row["verdict"],
        "words": f"on the large shapes at M = 1 at most {number(by_id[NEAR_FLOOR]['threshold'])} times the floor. "
        f"Observed {point} ({interval}), geometric mean.",
    }


def answers(
    kit: Tables,
    newest: pd.DataFrame,
    ordered: Sequence[Mapping],
    shapes: Sequence[Mapping],
    claim: Mapping | None = None,
    protocols: Mapping[str, Mapping] | None = None,
) -> list[dict]:
    """Questions that a sceptic asks of the harness, each with what the newest campaign that can answer it says.

    `claim`: what `near_floor` gives; `protocols`: frozen protocols by their SHA-256.
    """
    found = []
    asked = (_twin_answer, _cold_answer, _occupancy_answer, _exact_answer, _fp64_answer)
    for ask in asked:
        given = (ask(kit, campaign) for campaign in reversed(ordered))
        found.append(next((a for a in given if a), None))
    found.insert(2, _denominator_answer(kit, newest, shapes, claim))
    found.append(next((a for a in map(_launch_answer, reversed(ordered)) if a), None))
    given = (_clock_answer(kit, campaign, protocols or {}) for campaign in reversed(ordered))
    found.append(next((a for a in given if a), None))
    given = (_sitting_answer(kit, campaign) for campaign in reversed(ordered))
    found.append(next((a for a in given if a), None))
    return [a for a in found if a]


def _answer(
    question: str,
    short: str,
    words: str,
    table: dict | None = None,
    claim: Mapping | None = None,
) -> dict:
    return {"question": question, "short": short, "words": words, "table": table, "claim": claim}


def narrow(a_a: Mapping | None) -> str:
    """A sentence where copies of one kernel differ at more points than chance explains; empty otherwise."""
    if not a_a or a_a["differ"] <= a_a["high"]:
        return ""
    return (
        f"Copies of one kernel (A/A) differ at {a_a['differ']} of {a_a['points']} points, where 95 % intervals leave "
        f"{a_a['low']} to {a_a['high']}: read the intervals here as somewhat too narrow (the median difference of two "
        f"copies is {_percent(a_a['median'])})."
    )


def _twin_answer(_: Tables, campaign: Mapping) -> dict | None:
    a_a = campaign.get("a_a")
    if not a_a:
        return None
    low, high = a_a["low"], a_a["high"]
    where = f"{low} to {high} of {a_a['points']} (95 % range of the binomial)"
    if a_a["differ"] > high:
        judged = f"{a_a['differ']} is more: the intervals of this campaign are too narrow."
    elif a_a["differ"] < low:
        judged = f"{a_a['differ']} is fewer: the intervals of this campaign are wider than need be."
    else:
        judged = f"{a_a['differ']} lies in that range."
    return _answer(
        "Does a kernel differ from itself?",
        f"At {a_a['differ']} of {a_a['points']} points.",
        f"{_runs_beside_itself(a_a)} (A/A) in every {a_a['regime']} block, and the two are "
        f"compared like rivals. At 95 % confidence a sound harness is wrong in 5 % of the points: {where}. {judged} "
        f"Between the two the median difference is {_percent(a_a['median'])}, the largest {_percent(a_a['largest'])} "
        f"({a_a['shape']}, M = {a_a['M']}).",
    )


def _runs_beside_itself(a_a: Mapping) -> str:
    kernels = a_a.get("kernels") or [a_a["kernel"]]
    if len(kernels) == 1:
        return f"{kernels[0]} runs beside an exact copy of itself"
    return (
        f"{', '.join(kernels[:-1])} and {kernels[-1]} each run beside an exact copy of themselves"
    )


def _percent(share: float) -> str:
    return f"{number(100 * share, 2)} %"


def _cold_answer(kit: Tables, campaign: Mapping) -> dict | None:
    ratios = [c for c in campaign["counters"] if c["metric"] == _DRAM_RATIO]
    if not ratios:
        return None
    key = ("kernel", "format", "shape", "M")
    read = {
        tuple(c[k] for k in key): c["value"] for c in campaign["counters"] if c["metric"] == _DRAM
    }
    rows = []
    for c in ratios:
        place = tuple(c[k] for k in key)
        moved = read.get(place)
        rows.append(
            dict(zip(("kernel", "format", "shape"), place[:3], strict=True))
            | {"dram_mb": number(moved / 1e6) if moved else BLANK, "dram": number(c["value"], 4)}
        )
    values = [c["value"] for c in ratios]
    words = (
        "This is what the memory delivered, counted by the profiler in a pass of its own at M = 1. "
        "Cold weights give 1: each byte comes from memory once, and none from the L2 cache. A little under 1 means "
        "that the cache still held a few lines of a copy from its last turn, although the rotating copies are together "
        "larger than it; the time of such a cell can look too good by about that share at most."
    )
    return _answer(
        "Is cold cold?",
        f"{number(min(values))} to {number(max(values))} bytes read for each byte of weight.",
        words,
        kit.table(
            ("kernel", "shape", "dram", "dram_mb", "format"),
            rows,
            "Bytes that a cold call read from memory",
            "",
        ),
    )


def _denominator_answer(
    kit: Tables, newest: pd.DataFrame, shapes: Sequence[Mapping], claim: Mapping | None
) -> dict | None:
    large = [s["name"] for s in shapes if s.get("set") == "large"]
    cells = drawings.timed(newest, drawings.HEADLINE_REGIME)
    if cells.empty:
        return None
    cells = cells[
        (cells["kernel"] == "cublaslt_bf16")
        & cells["shape"].isin(large)
        & (cells["M"] <= SMALL_M)
        & cells["floor_us"].notna()
    ]
    cells = cells.assign(share=cells["floor_us"] / cells["time_us"])
    rows, one, best = [], [], []
    for shape in large:
        own = cells[cells["shape"] == shape]
        first = own[own["M"] == 1]
        if first.empty:
            continue
        at_one, at_best = first.iloc[0], own.loc[own["share"].idxmax()]
        one.append(at_one["share"])
        best.append(at_best["share"])
        rows.append(
            {
                "shape": shape,
                "call_us": number(at_one["time_us"]),
                "floor_us": number(at_one["floor_us"]),
                "floor_share": _percent_of(at_one["share"]),
                "floor_best": f"{_percent_of(at_best['share'])} (M = {at_best['M']})",
            }
        )
    if not rows:
        return None
    return _answer(
        "Is the floor a fair denominator?",
        f"cuBLASLt BF16 reaches {_percent_range(one)} of it at M = 1, and {_percent_range(best)} at its best M up to "
        f"{SMALL_M}.",
        "Nobody here wrote that kernel, and on large weights it does little but read them. Near 100 % would say that a "
        "library reaches the floor in practice; above 100 %, that the floor was measured too slow. "
        f"{denominator_meaning(one, best)}",
        kit.table(
            ("shape", "floor_share", "floor_best", "call_us", "floor_us"),
            rows,
            "cuBLASLt BF16 against the floor, large shapes, cold",
            "",
        ),
        claim,
    )


def denominator_meaning(one: Sequence[float], best: Sequence[float]) -> str:
    """What shares of the floor (0 to 1) at M = 1 and at the best M say of the floor as a denominator."""
    if max(*one, *best) > 1:
        return "Here a library call was faster than the floor, so fractions of the floor flatter a kernel."
    return (
        f"So the library leaves up to {_percent(1 / min(one) - 1)} over the floor at M = 1. The floor is harder to "
        "reach than the best library product: fractions of it are conservative."
    )


def _percent_of(share: float) -> str:
    return f"{100 * share:.1f} %"


def _percent_range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * end:.0f}" for end in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _occupancy_answer(_: Tables, campaign: Mapping) -> dict | None:
    tries = [a for a in campaign["attempts"] if a["stage"] == "occupancy"]
    if not tries:
        return None
    bad = [text(a["reason"]) for a in tries if a["status"] != "ok"]
    return _answer(
        "Does the driver agree with the computed occupancy?",
        f"In {len(tries) - len(bad)} of {len(tries)} comparisons.",
        "At each start of a measurement, the blocks per multiprocessor that follow from the compiled code are held "
        f"against the driver's own answer, launch by launch. {' '.join(bad) or 'No launch differed.'}",
    )


def _by(checks: Iterable[Mapping], key: str) -> dict[str, list[Mapping]]:
    groups: dict[str, list[Mapping]] = {}
    for check in checks:
        groups.setdefault(check[key], []).append(check)
    return dict(sorted(groups.items()))


def _passed(checks: Sequence[Mapping]) -> str:
    return f"{sum(bool(c['passed']) for c in checks)} of {len(checks)}"


def _exact_answer(_: Tables, campaign: Mapping) -> dict | None:
    exact = [c for c in campaign["checks"] if c["name"].startswith(_EXACT)]
    if not exact:
        return None
    counts = [f"{name}: {_passed(own)}" for name, own in _by(exact, "format").items()]
    return _answer(
        "Are the encodings read bit for bit?",
        f"{_passed(exact)} exact checks passed on the device.",
        "Structured inputs (a single weight, ramps, infinities, the ends of every scale) must give the exact "
        f"output, and decoded weights, all codes included, must match in every bit. By format: {', '.join(counts)}.",
    )


def _fp64_answer(_: Tables, campaign: Mapping) -> dict | None:
    random = [c for c in campaign["checks"] if c["name"].startswith("random_fp64")]
    if not random:
        return None
    worst = []
    for kernel, own in _by(random, "kernel").items():
        shares = [
            c["measured"] / c["limit"] for c in own if not absent(c["measured"]) and c["limit"]
        ]
        if shares:
            worst.append(f"{kernel} {number(max(shares), 2)}")
    return _answer(
        "Are the outputs right?",
        f"{_passed(random)} comparisons with 64-bit arithmetic passed.",
        "Random inputs, checked at every timed point, before the timing and again after it. Largest error over its "
        f"limit: {', '.join(worst)}. Above 1 fails; rounding an output to BF16 can by itself come close to 1.",
    )


def _launch_answer(campaign: Mapping) -> dict | None:
    constants = campaign.get("constants") or {}
    grids = {}
    for name, constant in constants.items():
        if name == "launch_floor_us":
            grids[campaign["device"]["sm_count"]] = constant["value"]
        elif found := re.fullmatch(r"launch_floor_grid(\d+)_us", name):
            grids[int(found[1])] = constant["value"]
    if not grids:
        return None
    each = [
        f"{number(v)} µs with {g} block{'s' if g > 1 else ''}" for g, v in sorted(grids.items())
    ]
    loop = constants.get("launch_loop_us")
    words = f"An empty kernel replayed in a graph takes {', '.join(each)}, the least that any replayed call costs."
    if loop:
        words += (
            f" Launched one by one from Python it takes {number(loop['value'])} µs, so a looped time near that value "
            "measures the host, not the kernel."
        )
    return _answer(
        "What does a launch cost?",
        f"{number(min(grids.values()))} µs at least in a graph.",
        words,
    )


def drop_reasons(campaign: Mapping, protocols: Mapping[str, Mapping]) -> str | None:
    """The frozen reasons for leaving a leg out, in words; None where the campaign's protocol is not at hand."""
    protocol = protocols.get(campaign["protocol_sha256"])
    if protocol is None:
        return None
    return ", ".join(_reason_words(r) for r in protocol["telemetry"]["drop_reasons"])


def _reason_words(reason: str) -> str:
    """hw_slowdown as hardware slowdown."""
    words = reason.split("_")
    return " ".join([{"hw": "hardware", "sw": "software"}.get(words[0], words[0]), *words[1:]])


def _share(share: float | None) -> str:
    return BLANK if absent(share) else f"{100 * share:.0f} %"


def _clock_answer(kit: Tables, campaign: Mapping, protocols: Mapping[str, Mapping]) -> dict | None:
    clocks = campaign.get("clocks")
    if not clocks or absent(clocks["capped"]):
        return None
    rows = [
        {
            "m_range": f"{b['m_low']} to {b['m_high']}"
            if b["m_low"] < b["m_high"]
            else f"{b['m_low']}",
            "capped": _share(b["capped"]),
            "sm_clock": number(b["sm_clock_mhz"], 4),
            "power_w": number(b["power_w"]),
            "readings": str(b["readings"]),
        }
        for b in clocks["bands"]
    ]
    words = (
        f"{clocks['readings']} readings fell into timed runs. The cap is the driver's own: it lowers the clock to stay "
        f"within the power limit of {number(campaign['device']['power_limit_w'])} W. That is how this device works "
        "under load, so a capped run is data and is kept. All kernels of a block meet it in turn."
    )
    if reasons := drop_reasons(campaign, protocols):
        words += f" A run is dropped for these frozen reasons only: {reasons}."
    steady = clocks["capped"] == 0
    return _answer(
        "Were the clocks steady?",
        "Yes: no reading shows the power cap."
        if steady
        else f"No: {_share(clocks['capped'])} of the readings show the power cap.",
        words,
        kit.table(
            ("m_range", "capped", "sm_clock", "power_w", "readings"),
            rows,
            "Clock and power while runs were timed",
            "",
        ),
    )


def _sitting_answer(kit: Tables, campaign: Mapping) -> dict | None:
    found = campaign.get("sittings")
    if not found:
        return None
    minutes = sum(s["minutes"] for s in found)
    rows = [
        {
            "sitting": str(i),
            "start": s["start"],
            "end": f"after {s['end']}" if s["cut_off"] else s["end"],
            "minutes": f"{'over ' if s['cut_off'] else ''}{s['minutes']:.1f}",
            "sitting_shapes": f"{', '.join(s['shapes']) or 'none'}{'; device constants' if s['constants'] else ''}",
        }
        for i, s in enumerate(found, 1)
    ]
    words = f"Measuring began {found[0]['start']} and ended {found[-1]['end']} (UTC)."
    if len(found) > 1:
        stops = [s["stop"] or "the process ended between two attempts" for s in found[:-1]]
        own = [i for i, s in enumerate(found, 1) if s["constants"]]
        words += (
            f" What stopped it: {'; '.join(stops)}. Started again, it went on with its journal, which it does only on "
            "the same device with the same driver, code and protocol. Kernels are compared inside blocks, so never "
            "across sittings; means over shapes take in all of them."
        )
        if own:
            words += (
                f" The device constants come from sitting {', '.join(map(str, own))} and serve all."
            )
        if pause := campaign.get("longest_pause_s"):
            words += f" The longest pause between two readings of the clocks is {number(pause)} s."
    return _answer(
        "Was it measured in one go?",
        f"Yes, in {minutes:.0f} minutes."
        if len(found) == 1
        else f"No: in {len(found)} sittings, {minutes:.0f} minutes together.",
        words,
        kit.table(
            ("sitting", "start", "end", "minutes", "sitting_shapes"),
            rows,
            "Sittings of the campaign",
            "",
        ),
    )
