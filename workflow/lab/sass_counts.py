"""How many instructions a kernel holds and its main loop repeats, from the disassembly of its cubin.

Counts are by base mnemonic (`LDG` for `LDG.E.128`). They prove that an ablation removed what was meant and nothing
else (`difference`), and give the warp instructions that 64 weights cost. Static counts: how often a branch is taken,
the disassembly does not say.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lab.sass import SassError, disassemble
from qgemm_mx.build import find_tool

MAIN_LOOP_RULE = (
    "main loop = of the outermost loops that multiply matrices (without one: that load, polling aside) and write "
    "nothing to global memory, the one with the most instructions; per 64 weights: its longest way round"
)
REGIME = "cold_graph"  # a cubin has no regime; the row stands beside those of the headline

_FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$", re.MULTILINE)
# `/*0040*/   @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;`: address, predicate, opcode with modifiers, operands.
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)([^;/]*);", re.MULTILINE
)
_ADDRESS = re.compile(r"\b0x([0-9a-f]+)\s*$")

_MATRIX = ("HMMA", "IMMA", "DMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA")
_LOADS = ("LDG", "LDGSTS", "LDS", "LDSM", "UBLKCP", "UTMALDG")
_WRITES = ("STG", "RED", "REDG", "ATOM", "ATOMG", "UTMASTG", "UTMAREDG", "UBLKRED", "UBLKCP.G")
_ENDS = ("EXIT", "RET", "BRX", "BRXU", "JMX", "KILL")


class Instruction(NamedTuple):
    """One instruction. predicate: `P0`, `!PT`, or empty. opcode: in full, `BRA.U.ANY`."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """Mnemonic without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def loads(self) -> bool:
        """Whether it loads data, from global or shared memory. A load with `.STRONG` polls a flag of another block."""
        return self.base in _LOADS and ".STRONG" not in self.opcode and not self.writes

    @property
    def writes(self) -> bool:
        """Whether it writes to global memory; `UBLKCP.G.S` copies there from shared memory."""
        return any(self.opcode == op or self.opcode.startswith(op + ".") for op in _WRITES)

    @property
    def target(self) -> int | None:
        """Address that a branch or call names, or None."""
        if self.base not in ("BRA", "CALL", "JMP"):
            return None
        found = _ADDRESS.search(self.operands)
        if found is None and self.base == "BRA":
            raise SassError(f"the target of {self.opcode}{self.operands} is not understood")
        return int(found[1], 16) if found else None


@dataclass(frozen=True)
class LoopCounts:
    """A loop: addresses of its first and last instruction, and instructions by base mnemonic.

    opcodes: of the whole body, both sides of every branch. path: of the longest way round, one side of each; what an
    iteration issues at most, inner loops taken once.
    """

    first: int
    last: int
    opcodes: Counter[str]
    path: Counter[str]

    @property
    def total(self) -> int:
        """Instructions of the body."""
        return self.opcodes.total()

    @property
    def path_total(self) -> int:
        """Instructions of the longest way round."""
        return self.path.total()


@dataclass(frozen=True)
class EntryCounts:
    """An entry function: instructions by base mnemonic, and its main loop (None where no loop loads or multiplies).

    The branch to itself and the NOPs behind it that fill up the function's end are not counted.
    """

    entry: str
    opcodes: Counter[str]
    loop: LoopCounts | None

    @property
    def total(self) -> int:
        """Instructions of the entry."""
        return self.opcodes.total()


def count_cubin(cubin: Path) -> dict[str, EntryCounts]:
    """Counts of every entry function of a cubin. SassError, BuildError as `lab.sass.disassemble`."""
    return count_entries(disassemble(cubin))


def count_entries(sass: str) -> dict[str, EntryCounts]:
    """Counts of every entry function in the text of `cuobjdump --dump-sass`.

    SassError when there is no function or one without instructions: a misread text must never count as nothing.
    """
    return {
        entry: EntryCounts(entry, _by_base(code), _main_loop(code))
        for entry, code in _entries(sass)
    }


def _entries(sass: str) -> list[tuple[str, list[Instruction]]]:
    """Entry functions with their instructions, less what fills up the end."""
    parts = _FUNCTION.split(sass)
    found = []
    for entry, body in zip(parts[1::2], parts[2::2], strict=True):
        code = [
            Instruction(int(a, 16), p or "", op, rest.strip())
            for a, p, op, rest in _INSTRUCTION.findall(body)
        ]
        if not code:
            raise SassError(f"the disassembly of {entry} has no instruction")
        found.append((entry, _without_padding(code)))
    if not found:
        raise SassError("the disassembly has no function")
    return found


def matrix_loops(sass: str) -> dict[str, list[LoopCounts]]:
    """The innermost loops with matrix instructions of every entry, fewest instructions on the way round first."""
    found = {}
    for entry, code in _entries(sass):
        flow = _Flow(code)
        bodies = {
            head: body
            for head, body in flow.loops().items()
            if any(code[i].base in _MATRIX for b in body for i in flow.blocks[b])
        }
        inner = [h for h, b in bodies.items() if not any(other < b for other in bodies.values())]
        counts = [_counts_of(code, flow, head, bodies[head]) for head in inner]
        found[entry] = sorted(counts, key=lambda loop: loop.path_total)
    return found


def _without_padding(code: list[Instruction]) -> list[Instruction]:
    end = len(code)
    while end and code[end - 1].opcode == "NOP":
        end -= 1
    if end and code[end - 1].base == "BRA" and code[end - 1].target == code[end - 1].address:
        return code[: end - 1]
    return code[:end]


def _by_base(code: Iterable[Instruction]) -> Counter[str]:
    return Counter(i.base for i in code)


# ---- loops -------------------------------------------------------------------------------------------------------


def _main_loop(code: list[Instruction]) -> LoopCounts | None:
    """The main loop as `MAIN_LOOP_RULE` says.

    Not the innermost: a loop that copies a stage lies within the main loop wherever its trip count is not known to the
    compiler. Not simply the outermost: over output tiles runs a loop that writes them, and an epilogue is a loop that
    writes too. Where every loop writes, the main loop is unrolled into the one over tiles, and that is taken.
    """
    flow = _Flow(code)

    def some(blocks: frozenset[int], holds: Callable[[Instruction], bool]) -> bool:
        return any(holds(code[i]) for b in blocks for i in flow.blocks[b])

    every = flow.loops()
    matrix = {h: b for h, b in every.items() if some(b, lambda one: one.base in _MATRIX)}
    loops = matrix or {h: b for h, b in every.items() if some(b, lambda one: one.loads)}
    loops = {h: b for h, b in loops.items() if not some(b, lambda one: one.writes)} or loops
    outermost = [h for h, b in loops.items() if not any(b < other for other in loops.values())]
    if not outermost:
        return None
    head = max(outermost, key=lambda h: (flow.size(loops[h]), -h))
    return _counts_of(code, flow, head, loops[head])


def _counts_of(code: list[Instruction], flow: _Flow, head: int, body: frozenset[int]) -> LoopCounts:
    inside = [code[i] for b in sorted(body) for i in flow.blocks[b]]
    path = [code[i] for b in flow.longest_path(head, body) for i in flow.blocks[b]]
    return LoopCounts(inside[0].address, inside[-1].address, _by_base(inside), _by_base(path))


class _Flow:
    """Control flow of a function: `blocks` of instruction indices, and for each block those that `follow` it."""

    def __init__(self, code: list[Instruction]) -> None:
        after = _successors(code)
        self.blocks, block_of = _blocks(code, after)
        self.follows = [sorted({block_of[j] for j in after[block[-1]]}) for block in self.blocks]
        self.reached = _reach(0, self.follows)
        self.before: list[list[int]] = [[] for _ in self.blocks]
        for source in self.reached:
            for target in self.follows[source]:
                self.before[target].append(source)

    def size(self, blocks: Iterable[int]) -> int:
        """Instructions of some blocks."""
        return sum(len(self.blocks[b]) for b in blocks)

    def loops(self) -> dict[int, frozenset[int]]:
        """The blocks of every natural loop, by its head.

        A branch to a lower address is a loop only if its target dominates it: the compiler moves waits out of line,
        behind the function's end, and their way back is no loop. (Aho et al., Compilers, 9.6)
        """
        dominators = _dominators(self.reached, self.before)
        found: dict[int, set[int]] = {}
        for source in self.reached:
            for head in self.follows[source]:
                if head in dominators[source]:
                    inside = _reach(source, self.before, head) if source != head else set()
                    found.setdefault(head, {head}).update(inside)
        return {head: frozenset(body) for head, body in found.items()}

    def longest_path(self, head: int, body: frozenset[int]) -> list[int]:
        """The way once round a loop that has the most instructions: one of two branches, inner loops once."""
        order = [b for b in self._topological(head) if b in body]
        place = {b: i for i, b in enumerate(order)}
        best: dict[int, list[int]] = {}
        for b in order:
            # An edge against the order goes round a loop.
            ways = [
                best[a] for a in self.before[b] if place.get(a, len(order)) < place[b] and a in best
            ]
            if b == head:
                best[b] = [b]
            elif ways:
                best[b] = [*max(ways, key=self.size), b]
        return max((best[b] for b in best if head in self.follows[b]), key=self.size)

    def _topological(self, start: int) -> list[int]:
        """Blocks reached from `start`, each before those that follow it, back edges aside."""
        done, seen, stack = [], {start}, [(start, iter(self.follows[start]))]
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if n not in seen), None)
            if following is None:
                done.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.follows[following])))
        return done[::-1]


def _successors(code: list[Instruction]) -> list[list[int]]:
    """Indices of the instructions that can come next."""
    index = {one.address: i for i, one in enumerate(code)}
    after = []
    for i, one in enumerate(code):
        following = [i + 1] if i + 1 < len(code) else []
        # BRA.U.ANY goes round once a distinct value in the warp, and the values are equal here: no loop.
        if one.opcode == "BRA.U.ANY" or one.predicate in ("!PT", "!UPT"):
            after.append(following)
            continue
        always = one.predicate in ("", "PT", "UPT")
        target = one.target
        # `BRA P1, 0x80` and `BRA.DIV UR4, 0x80` have their condition among the operands.
        jumps = one.base in ("BRA", "JMP") and "," not in one.operands
        if always and (jumps or one.base in _ENDS):
            following = []
        if target is not None and target in index:
            following = [*following, index[target]]
        after.append(following)
    return after


def _blocks(
    code: list[Instruction], after: list[list[int]]
) -> tuple[list[list[int]], dict[int, int]]:
    """Basic blocks as lists of instruction indices, and the block of each index."""
    heads = {0} | {j for i, nexts in enumerate(after) if nexts != [i + 1] for j in nexts}
    heads |= {i + 1 for i, nexts in enumerate(after) if nexts != [i + 1]}
    blocks: list[list[int]] = []
    for i in range(len(code)):
        if i in heads:
            blocks.append([])
        blocks[-1].append(i)
    return blocks, {i: b for b, block in enumerate(blocks) for i in block}


def _reach(start: int, edges: list[list[int]], barrier: int | None = None) -> set[int]:
    """Nodes reached from `start` along `edges`, never past `barrier`."""
    seen, waiting = {start}, [start]
    while waiting:
        for node in edges[waiting.pop()]:
            if node not in seen and node != barrier:
                seen.add(node)
                waiting.append(node)
    return seen


def _dominators(reached: Iterable[int], before: list[list[int]]) -> dict[int, frozenset[int]]:
    everything = frozenset(reached)
    found = dict.fromkeys(everything, everything) | {0: frozenset({0})}
    changed = True
    while changed:
        changed = False
        for node in sorted(everything - {0}):
            new = frozenset.intersection(*(found[b] for b in before[node])) | {node}
            changed |= new != found[node]
            found[node] = new
    return found


# ---- what the counts say -----------------------------------------------------------------------------------------


def loop_instructions_per_64_weights(loop_count: int, weights_per_iteration: int) -> float:
    """Warp instructions that 64 weights cost in the main loop.

    loop_count: instructions of an iteration (`LoopCounts.path_total`). weights_per_iteration: weights that one warp
    handles in an iteration, all iterations that the compiler unrolled into one counted. ValueError if not above 0.
    """
    if weights_per_iteration <= 0:
        raise ValueError(f"weights_per_iteration={weights_per_iteration} is not above 0")
    return 64 * loop_count / weights_per_iteration


@dataclass(frozen=True)
class Difference:
    """What a variant has less (`removed`) and more (`added`) than the full kernel, instructions by mnemonic."""

    removed: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)

    def beyond(self, meant: Iterable[str]) -> dict[str, int]:
        """Change of every mnemonic that is not among `meant`; below 0: removed. Empty: nothing else was touched."""
        kept = set(meant)
        changes = {op: -n for op, n in self.removed.items()} | dict(self.added)
        return {op: changes[op] for op in sorted(changes) if op not in kept}


def difference(full: Mapping[str, int], variant: Mapping[str, int]) -> Difference:
    """Opcode counts that `variant` has less and more than `full`: of two entries or of two loops."""
    return Difference(
        removed=Counter(full) - Counter(variant), added=Counter(variant) - Counter(full)
    )


@cache
def tool() -> str:
    """Name and version of the disassembler. BuildError when it is missing."""
    command = [str(find_tool("cuobjdump")), "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    version = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return f"cuobjdump {version[1] if version else '?'}"


def counter_rows(
    counts: EntryCounts,
    kernel: str,
    format: str,
    place: Mapping[str, Any],
    weights_per_iteration: int | None = None,
    tool_words: str | None = None,
    rule: str | None = None,
) -> list[dict[str, Any]]:
    """Counter rows of an entry. place: shape, N, K, M of the cell that runs it; other keys are refused.

    rule: which loop `counts.loop` is, where it is not the main loop.

    Rows of the loop are there only if the entry has a main loop, `loop_instructions_per_64_weights` only if
    `weights_per_iteration` is given too: what is not known is never zero.
    """
    if set(place) != {"shape", "N", "K", "M"}:
        raise ValueError(f"place of {kernel} has keys {sorted(place)}, not shape, N, K, M")
    values: list[tuple[str, str, float]] = [
        (f"sass_{opcode}", "instructions", n) for opcode, n in sorted(counts.opcodes.items())
    ]
    values.append(("sass_total", "instructions", counts.total))
    if counts.loop is not None:
        values.append(("sass_loop_total", "instructions", counts.loop.total))
        if weights_per_iteration is not None:
            per_64 = loop_instructions_per_64_weights(counts.loop.path_total, weights_per_iteration)
            values.append(
                ("loop_instructions_per_64_weights", "warp instructions per 64 weights", per_64)
            )
    where = {"kernel": kernel, "format": format, **place, "regime": REGIME}
    words = f"{tool_words or tool()}; entry {counts.entry}"
    return [
        {
            **where,
            "metric": metric,
            "unit": unit,
            "value": float(value),
            "tool": f"{words}; {rule or MAIN_LOOP_RULE}" if "loop_" in metric else words,
        }
        for metric, unit, value in values
    ]


__all__ = [
    "Difference",
    "EntryCounts",
    "LoopCounts",
    "MAIN_LOOP_RULE",
    "count_cubin",
    "count_entries",
    "counter_rows",
    "difference",
    "loop_instructions_per_64_weights",
    "tool",
]
