"""What the profiler counted of our kernels and their rivals, call by call, and by rule what holds a call up.

A rule reads a call's counters in a fixed order and names the first limit that it finds; the numbers that decided stand
in the sentence. Counters come from a pass of their own, so a call that was not profiled is explained by the one nearest
to it in M and then in size, and the sentence says so and which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.decomposition import FLOOR
from lab.page import number
from lab.records import Campaign
from lab.statistics import Estimate
from qgemm_mx.formats import weight_bytes

KERNEL = "qgemv_mx"
#: Percent of cycles in which a scheduler issued, from which on instruction issue sets the time.
ISSUE_BOUND = 70.0
#: Part of the asymptotic bandwidth from which on memory sets the time.
MEMORY_BOUND = 0.85
#: Percent of cycles in which the tensor pipe worked, from which on products set the time.
TENSOR_BOUND = 75.0
#: Bytes read over the bytes of the operands above which something is read again.
READ_AGAIN = 1.1
#: With more tokens than these, products may set the time, and reading again is no fault while memory has time left.
FEW_TOKENS, BUSY_MEMORY = 16, 0.5

DURATION, READ = "gpu__time_duration.sum", "dram__bytes_read.sum"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
ELIGIBLE = "smsp__warps_eligible.avg.per_cycle_active"
DRAM_PEAK = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
)
REGISTERS, BLOCK = "launch__registers_per_thread", "launch__block_size"
WAVES, GRID = "launch__waves_per_multiprocessor", "launch__grid_size"
LIMITS = "launch__occupancy_limit_"
SPILLS = ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum")
L2_HITS = "lts__t_sector_hit_rate.pct"
INSTRUCTIONS = "smsp__inst_executed.sum"
LOOP = "loop_instructions_per_64_weights"
SASS = "sass_"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
MAX_WARPS = 64  # of a multiprocessor of sm_90
COLD = "cold_loop"

#: Longest stall -> what the warps wait for.
WAITS = {
    "long_scoreboard": "for memory: too few bytes are on their way",
    "short_scoreboard": "for shared memory",
    "barrier": "at barriers for each other",
    "mio_throttle": "for the queue of shared-memory instructions",
    "lg_throttle": "for the queue of loads from memory",
    "math_pipe_throttle": "for an arithmetic pipe",
    "wait": "out the fixed latency of instructions that depend on each other",
    "not_selected": "while other warps issue",
    "gmma": "for products of their own warpgroup (wgmma)",
    "warpgroup_arrive": "for their warpgroup to come together before a product",
    "sleeping": "asleep between two looks at a barrier",
    "branch_resolve": "for the target of a branch",
}


@dataclass(frozen=True)
class Profile:
    """Counters of one call by metric. bandwidth: asymptotic read bandwidth in TB/s, or None."""

    kernel: str
    format: str
    shape: str
    N: int
    K: int
    M: int
    values: Mapping[str, float]
    bandwidth: float | None

    @property
    def place(self) -> str:
        """Where it was taken."""
        return f"{self.shape} M = {self.M}"

    @property
    def read_tbps(self) -> float | None:
        """Bytes read from memory over the duration under the profiler, TB/s."""
        if not {READ, DURATION} <= self.values.keys():
            return None
        return self.values[READ] / self.values[DURATION] / 1e3

    @property
    def of_asymptote(self) -> float | None:
        """That rate over the asymptotic bandwidth."""
        rate = self.read_tbps
        return None if rate is None or self.bandwidth is None else rate / self.bandwidth

    @property
    def read_over_weight(self) -> float | None:
        """Bytes read from memory over the bytes of the weight."""
        read = self.values.get(READ)
        return None if read is None else read / weight_bytes(self.format, self.N, self.K)

    @property
    def read_over_operands(self) -> float | None:
        """Bytes read from memory over those of the weight and the activations."""
        read = self.values.get(READ)
        each = 1 if self.format == "fp8_e4m3" else 2
        least = weight_bytes(self.format, self.N, self.K) + each * self.M * self.K
        return None if read is None else read / least

    @property
    def tensor(self) -> float | None:
        """Percent of cycles in which the tensor pipe worked: of two counters that may read 0 the larger one."""
        return max((self.values[name] for name in TENSOR if name in self.values), default=None)

    @property
    def stall(self) -> tuple[str, float] | None:
        """The longest stall and its cycles for each instruction issued."""
        found = {s[1]: v for name, v in self.values.items() if (s := STALL.fullmatch(name))}
        if not found:
            return None
        name = max(found, key=lambda key: (found[key], key))
        return name, found[name]

    @property
    def spills(self) -> float | None:
        """Instructions that load or store local memory; 0 where no register was spilled."""
        found = [self.values[name] for name in SPILLS if name in self.values]
        return sum(found) if found else None

    @property
    def instructions(self) -> float | None:
        """Warp instructions executed for every 64 weights, prologue and epilogue included."""
        found = self.values.get(INSTRUCTIONS)
        return None if found is None else found * 64 / (self.N * self.K)

    @property
    def occupancy(self) -> tuple[float, str] | None:
        """Resident warps that registers, shared memory and block size allow, over the most; and what limits them."""
        limits = {
            name.removeprefix(LIMITS): value
            for name, value in self.values.items()
            if name.startswith(LIMITS)
        }
        if not limits or BLOCK not in self.values:
            return None
        what = min(limits, key=lambda name: (limits[name], name))
        return limits[what] * self.values[BLOCK] / 32 / MAX_WARPS, what.replace("_", " ")

    def opcodes(self) -> dict[str, float]:
        """Instructions of the compiled entry by opcode, without the totals."""
        found = {k.removeprefix(SASS): v for k, v in self.values.items() if k.startswith(SASS)}
        return {name: value for name, value in found.items() if not name.endswith("total")}


def profiles(
    campaign: Campaign,
    bandwidth: Estimate | None,
    wanted: Callable[[str], bool] = lambda kernel: kernel in (KERNEL, FLOOR),
) -> list[Profile]:
    """The calls of the decode kernel and its floor that were profiled, in the order of shape, M and format.

    wanted: kernel id -> whether it is shown. Of two rows of one metric the cold one counts.
    """
    found: dict[tuple, dict[str, float]] = {}
    for row in sorted(campaign.counters, key=lambda r: r["regime"] == COLD):
        if wanted(row["kernel"]):
            place = tuple(row[k] for k in ("shape", "M", "format", "kernel", "N", "K"))
            found.setdefault(place, {})[row["metric"]] = float(row["value"])
    rate = None if bandwidth is None else bandwidth.value
    return [
        Profile(kernel, fmt, shape, n, k, m, values, rate)
        for (shape, m, fmt, kernel, n, k), values in sorted(found.items())
    ]


def nearest(
    found: Iterable[Profile], fmt: str, n: int, k: int, m: int, kernel: str = KERNEL
) -> Profile | None:
    """The profiled call of a kernel in a format that is nearest in M, then in size; its duration must be there."""

    def distance(p: Profile) -> tuple:
        return (
            abs(math.log2(p.M / m)),
            abs(math.log(p.N * p.K / (n * k))),
            p.M,
            p.shape,
        )

    own = [p for p in found if (p.kernel, p.format) == (kernel, fmt) and DURATION in p.values]
    return min(own, key=distance, default=None)


def reason(profile: Profile | None, n: int, k: int, m: int) -> str:
    """By rule, what holds the call of (N, K, M) up: the first limit that the counters of a call show, with the numbers.

    The sentence begins with the call that was profiled, since that may be another one.
    """
    if profile is None:
        return "not profiled"
    own = (profile.N, profile.K, profile.M) == (n, k, m)
    where = "in its own profile" if own else f"in the profiled call, {profile.place}"
    return f"{where}: {'; '.join([_limit(profile), *_numbers(profile)])}"


def _limit(p: Profile) -> str:
    issue, share, again = p.values.get(ISSUE), p.of_asymptote, p.read_over_operands
    few = p.M <= FEW_TOKENS
    if p.spills:
        return "registers spill to memory"
    if not few and p.tensor is not None and p.tensor >= TENSOR_BOUND:
        return "tensor-bound, the tensor cores are busy"
    if again is not None and again > READ_AGAIN and (few or (share or 0) >= BUSY_MEMORY):
        return f"it reads {number(again)} times the bytes of its operands"
    if share is not None and share >= MEMORY_BOUND:
        return "memory-bound, it reads nearly as fast as the device can"
    if issue is not None and issue >= ISSUE_BOUND:
        return "issue-bound, the schedulers are busy"
    if p.stall is not None:
        name, cycles = p.stall
        waits = WAITS.get(name, f"on {name.replace('_', ' ')}")
        return f"latency-bound, warps wait {waits} ({number(cycles)} cycles an instruction)"
    return "no limit of these counters is reached"


def _numbers(p: Profile) -> Sequence[str]:
    parts = []
    if p.read_tbps is not None:
        share = "" if p.of_asymptote is None else f", {100 * p.of_asymptote:.0f} % of the asymptote"
        parts.append(f"it reads {number(p.read_tbps)} TB/s under the profiler{share}")
    if ISSUE in p.values:
        parts.append(f"issue slots {p.values[ISSUE]:.0f} %")
    if p.M > FEW_TOKENS and p.tensor is not None:
        parts.append(f"tensor pipe {p.tensor:.0f} %")
    if WARPS in p.values:
        parts.append(f"resident warps {p.values[WARPS]:.0f} %")
    return parts
