"""What the compiler really emitted: opcode counts of a cubin, held against the facts that a source declares."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from qgemm_mx.build import KernelSource, find_tool

# `/*0040*/   @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;`: offset, predicate (plain or uniform), opcode with its modifiers.
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)
_FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$", re.MULTILINE)


class SassError(Exception):
    """A cubin that cannot be disassembled, or whose disassembly is not understood."""


def disassemble(cubin: Path) -> str:
    """The text of `cuobjdump --dump-sass`. Raises SassError with the tool's words, BuildError when it is missing."""
    done = subprocess.run(
        [str(find_tool("cuobjdump")), "--dump-sass", str(cubin)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SassError(
            f"{cubin.name} cannot be disassembled: {(done.stdout + done.stderr).strip()}"
        )
    return done.stdout


def opcode_counts(sass: str) -> dict[str, Counter[str]]:
    """Instructions per entry function, by full opcode (`LDG.E.128`), from the text of `disassemble`.

    Raises SassError when there is no function or a function without instructions: counts of a misread text would make
    every `forbid` hold.
    """
    parts = _FUNCTION.split(sass)
    counts = {
        name: Counter(_INSTRUCTION.findall(body))
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    if not counts:
        raise SassError("the disassembly has no function")
    for name, found in counts.items():
        if not found:
            raise SassError(f"the disassembly of {name} has no instruction")
    return counts


def count(counts: Mapping[str, int], opcode: str) -> int:
    """Instructions that are `opcode` or a form of it: `LDG` counts `LDG.E.128`, `LDG.E` does not count `LDG.64`."""
    return sum(n for full, n in counts.items() if full == opcode or full.startswith(opcode + "."))


def check(source: KernelSource, arch: str, counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The declared SASS facts that do not hold, one sentence each with kernel, architecture, opcode.

    A required opcode must be in some entry function, a forbidden one in none.
    """
    facts = source.sass[arch]
    problems = [
        f"{source.name} ({arch}) promises {opcode}, but no entry function has it"
        for opcode in facts.require
        if not any(count(found, opcode) for found in counts.values())
    ]
    for opcode in facts.forbid:
        for entry, found in counts.items():
            if n := count(found, opcode):
                problems.append(f"{source.name} ({arch}) forbids {opcode}, but {entry} has {n}")
    return problems


def check_cubin(source: KernelSource, arch: str, cubin: Path) -> list[str]:
    """`check` on a built cubin."""
    return check(source, arch, opcode_counts(disassemble(cubin)))
