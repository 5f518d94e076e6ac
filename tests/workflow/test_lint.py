"""The code is formatted, and linters have nothing to say."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("snakefmt", "--check", "Snakefile", "workflow/rules"),
        ("snakemake", "--lint"),
    ],
    ids=" ".join,
)
def test_lint(repository: Path, checkout, command: tuple[str, ...]) -> None:
    # Snakemake leaves a folder where it runs, so it runs in a copy.
    place = checkout.root if command[0] == "snakemake" else repository
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def blocks(repository: Path) -> dict[str, str]:
    """Rule -> its text, dedented, from all rule files."""
    found = {}
    for path in (repository / "workflow" / "rules").glob("*.smk"):
        for match in re.finditer(
            r"^( *)rule (\w+):\n((?:\1 +.*\n|\n)+)", path.read_text(), flags=re.M
        ):
            found[match[2]] = "\n" + textwrap.indent(textwrap.dedent(match[3]), "    ")
    return found


def test_every_script_has_its_rule_and_every_rule_its_script(repository: Path) -> None:
    named = {}
    for name, body in blocks(repository).items():
        if script := re.search(r'"\.\./scripts/(\w+)\.py"', body):
            named[name] = script[1]
    assert all(name == script for name, script in named.items()), named
    files = {path.stem for path in (repository / "workflow" / "scripts").glob("*.py")}
    assert files == set(named)


def test_every_rule_that_does_something_says_so(repository: Path) -> None:
    for name, body in blocks(repository).items():
        if "script:" in body:
            for part in ("log:", "resources:", "message:", "conda:"):
                assert part in body, f"rule {name} has no {part}"
            # A benchmark file counts as an output, and a rule without outputs is to run each time.
            assert ("\n    benchmark:" in body) == ("\n    output:" in body), f"rule {name}"
