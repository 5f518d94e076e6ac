"""Audit: predicted against observed for every registered claim, and whether any of it can be trusted.

    python -m lab.audit --repo .

Nothing is taken on faith: the registry is verified against files and history, campaigns against
their hashes, and every verdict is judged anew. A missed or refuted claim is a result and passes.

exit status  meaning
0            every claim has its verdict and every proof holds
3            TAMPERED: a frozen document, the registry, a campaign or the order of history
4            INVALID: data that cannot be judged, or a report that is not what the data give
5            UNVERIFIABLE: history is not available (shallow clone, archive, nothing committed)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lab import records, registry, select, verdicts
from lab.claims import Claim
from lab.registry import Git, Problem, Registered, Unverifiable
from lab.verdicts import Evidence, Verdict
from qgemm_mx.formats import DENSE_BYTES, FORMATS, bytes_per_weight

EXIT = {"OK": 0, "TAMPERED": 3, "INVALID": 4, "UNVERIFIABLE": 5}
CAMPAIGNS = "data/campaigns"
CUDA = "kernels/qgemm_mx/cuda"
# FP4 kernels and their sources: the blind claims about a kernel precede the first commit of each.
KERNEL_SOURCES: dict[str, tuple[str, ...]] = {
    "reference": (f"{CUDA}/reference.cu",),
    "naive_dequant": (f"{CUDA}/naive_dequant.cu",),
    "testbed": (f"{CUDA}/testbed.cu",),
    "qgemv_mx": (f"{CUDA}/qgemv_mx.cu",),
    "qgemm_mx": (f"{CUDA}/qgemm_mx.cu",),
    "linear": (f"{CUDA}/qgemv_mx.cu", f"{CUDA}/qgemm_mx.cu"),
}


@dataclass(frozen=True)
class AuditResult:
    """What the audit found; ``exit_code`` follows the worst status."""

    status: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit status of the command."""
        return EXIT[self.status]


@dataclass(frozen=True)
class Examination:
    """Everything that judging needs, and its verdicts; pure analysis, no GPU."""

    registered: Registered
    integrity: tuple[Problem, ...]
    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    campaign_problems: tuple[Problem, ...] = field(default=())

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Registered claims, then drafts."""
        return self.registered.claims + self.registered.unregistered


def mechanical_facts() -> dict[str, float]:
    """Numbers that follow from code alone."""
    return {f"bytes_per_weight/{name}": bytes_per_weight(name) for name in (*FORMATS, *DENSE_BYTES)}


def examine(
    repo: str | Path,
    campaigns: Iterable[str | Path],
    verify_campaign: Callable[[Path], list[str]] = records.verify,
    kernel_sources: Mapping[str, Sequence[str]] = KERNEL_SOURCES,
) -> Examination:
    """Load, verify and judge everything. ``campaigns`` are the folders that claims are judged by."""
    repo = Path(repo).resolve()
    folders = sorted({Path(folder).resolve() for folder in campaigns})
    prereg = repo / "prereg"
    registered = registry.load_registered(prereg)
    found = [*registry.verify(prereg), *registered.unreadable, *registry.history(repo).problems]
    found += order_problems(repo, registered, kernel_sources)
    tampered, removed, campaign_problems = _edited_campaigns(repo)
    found += removed
    invalid = {}
    for folder in folders:
        reasons = verify_campaign(folder)
        if reasons:
            invalid[folder.name] = "; ".join(reasons)
            name = _relative(folder, repo)
            campaign_problems += [Problem("INVALID", name, reason) for reason in reasons]
    evidence = Evidence.from_campaigns(
        [f for f in folders if f.name not in invalid or _readable(f)],
        protocol_sha256=registry.frozen_files(prereg).get("prereg/protocol.json"),
        facts=mechanical_facts(),
        invalid=invalid,
        tampered=tampered,
    )
    problems = tuple(dict.fromkeys(found))
    claims = registered.claims + registered.unregistered
    judged = verdicts.judge(claims, evidence, problems, registered.ids)
    return Examination(registered, problems, evidence, tuple(judged), tuple(campaign_problems))


def _readable(folder: Path) -> bool:
    """Whether a campaign with problems still shows which claims it spoils."""
    try:
        Evidence.from_campaigns([folder])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _relative(path: Path, repo: Path) -> str:
    return path.relative_to(repo).as_posix() if path.is_relative_to(repo) else path.name


# Proofs of order.


def _edited_campaigns(repo: Path) -> tuple[dict[str, str], list[Problem], list[Problem]]:
    """Campaigns are written once: history and the working tree may only add their files.

    Gives the reason for each edited campaign, the problems of removed campaigns (which may have
    held any cell, so they touch every claim) and those of edited ones (which spoil what is judged
    by them).
    """
    options = ("--no-renames", "--diff-filter=MTD", "--name-only")
    try:
        git = Git(repo)
        past = git.text("log", "--full-history", "-m", *options, "--format=", "--", CAMPAIGNS)
        present = git.text("diff", *options, "HEAD", "--", CAMPAIGNS)
    except Unverifiable:
        return {}, [], []  # history() reports it
    reasons, removed, edited = {}, [], []
    for name in dict.fromkeys([*past.split("\n"), *present.split("\n")]):
        if not name:
            continue
        campaign = Path(name).relative_to(CAMPAIGNS).parts[0]
        if (repo / CAMPAIGNS / campaign).exists():
            problem = Problem("TAMPERED", name, "a committed campaign was edited: it is write-once")
            edited.append(problem)
        else:
            problem = Problem("TAMPERED", name, "a committed campaign was removed")
            removed.append(problem)
        reasons[campaign] = str(problem)
    return reasons, removed, edited


def order_problems(
    repo: str | Path,
    registered: Registered,
    kernel_sources: Mapping[str, Sequence[str]] = KERNEL_SOURCES,
) -> list[Problem]:
    """Where a blind claim was not frozen before the kernel it predicts or the campaign that measured it.

    A claim marked seen or mechanical needs no such proof: it says itself that data or arithmetic
    came first.
    """
    repo = Path(repo).resolve()
    try:
        git = Git(repo)
    except Unverifiable:
        return []  # history() reports it
    files: dict[str, list[Claim]] = {}
    known = set(registered.ids)
    for claim in registered.claims:
        if claim.novelty == "blind" and claim.id in known:
            files.setdefault(registered.source[claim.id], []).append(claim)
    campaigns = _recorded(repo)
    heads = _heads(repo)
    problems: list[Problem] = []
    added = cache(lambda path: (git.commits(path, added=True) or [None])[0])
    for file, claims in files.items():
        try:
            frozen = registry.freeze_commit(git, file)
            for source in sorted({s for claim in claims for s in _sources(claim, kernel_sources)}):
                first = added(source)
                if first and (first == frozen or not git.is_ancestor(frozen, first)):
                    about = [c.id for c in claims if source in _sources(c, kernel_sources)]
                    reason = f"{source} came with commit {first[:12]}, not after the freeze"
                    problems.append(Problem("TAMPERED", file, reason, tuple(about)))
            for name, record in campaigns.items():
                about = tuple(claim.id for claim in claims if _measures(record, claim))
                if not about:
                    continue
                commit = added(f"{CAMPAIGNS}/{name}/campaign.json")
                verdict = _measured_after(git, frozen, record, commit, file, heads)
                if verdict:
                    status, reason = verdict
                    problems.append(Problem(status, f"{CAMPAIGNS}/{name}", reason, about))
        except Unverifiable as error:
            problems.append(Problem("UNVERIFIABLE", file, str(error)))
    return problems


def _measured_after(
    git: Git,
    frozen: str,
    record: Mapping[str, Any],
    added: str | None,
    file: str,
    heads: Mapping[str, set[str]],
) -> tuple[str, str] | None:
    """Status and reason when nothing proves that a campaign was taken after a freeze.

    Two things can prove it: the commit it was measured at, and the hash of the registry's last
    line, which nobody could know before the freeze.
    """
    commit, head = record["source"].get("commit"), record.get("prereg_head")
    if added and not git.is_ancestor(frozen, added):
        return "TAMPERED", f"was committed ({added[:12]}) without the freeze of {file}"
    if commit and not git.exists(commit):
        return "UNVERIFIABLE", f"was measured at commit {commit[:12]}, which history lacks"
    if commit and not git.is_ancestor(frozen, commit):
        return "TAMPERED", f"was measured at commit {commit[:12]}, before the freeze of {file}"
    if head and head not in heads:
        return "TAMPERED", f"records the registry {head[:12]}, which never was"
    if head and file not in heads[head]:
        return "TAMPERED", f"records the registry {head[:12]}, before the freeze of {file}"
    if not commit and not head:
        return "UNVERIFIABLE", "records neither the commit nor the registry it was measured with"
    return None


def _sources(claim: Claim, table: Mapping[str, Sequence[str]]) -> set[str]:
    kernels = {cell.kernel.partition("/")[0] for cell in claim.estimand.cells}
    return {source for kernel in kernels for source in table.get(kernel, ())}


def _recorded(repo: Path) -> dict[str, dict[str, Any]]:
    """All campaigns, pilots too: a pilot shows a cell's answer just as well."""
    found = {}
    for path in sorted((repo / CAMPAIGNS).glob("*/campaign.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # records.verify reports it
        if isinstance(record, dict) and isinstance(record.get("source"), dict):
            found[path.parent.name] = record
    return found


def _heads(repo: Path) -> dict[str, set[str]]:
    """Hash of each manifest line -> the files that are frozen by then."""
    path = repo / "prereg" / registry.MANIFEST
    known: set[str] = set()
    heads: dict[str, set[str]] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        if line:
            known = known | {file["path"] for file in json.loads(line)["files"]}
            heads[registry.sha256(line)] = known
    return heads


def _measures(record: Mapping[str, Any], claim: Claim) -> bool:
    """Whether a campaign holds a number that answers the claim."""
    estimand = claim.estimand
    if estimand.quantity in ("constant", "external", "share"):
        names = set(estimand.items) or {estimand.name}
        return any(
            key in names or (key.startswith("share/") and key.split("/")[1] in names)
            for key in record.get("constants", {})
        )
    rows = record.get("checks" if estimand.quantity == "check" else "cells", [])
    keys = ("kernel", "format", "N", "K", "M")
    measured = {tuple(row.get(key) for key in keys) for row in rows}
    return any(tuple(getattr(cell, key) for key in keys) in measured for cell in estimand.cells)


# The audit.


def audit(
    repo: str | Path,
    examination: Examination,
    shown: str | Path | None = None,
) -> AuditResult:
    """Weigh what was found. ``shown``: the committed verdicts.csv, held against the fresh verdicts."""
    repo = Path(repo).resolve()
    problems = list(examination.integrity) + list(examination.campaign_problems)
    for verdict in examination.verdicts:
        if verdict.verdict == "INVALID":
            problems.append(
                Problem("INVALID", verdict.campaign or "?", verdict.reason, (verdict.claim,))
            )
    if shown is not None and Path(shown).exists():
        problems += _stale(Path(shown), examination.verdicts, repo)
    notes = tuple(str(p) for p in problems if p.status == "UNREGISTERED")
    counted = [p for p in problems if p.status != "UNREGISTERED"]
    statuses = {problem.status for problem in counted}
    status = next((s for s in ("TAMPERED", "INVALID", "UNVERIFIABLE") if s in statuses), "OK")
    return AuditResult(
        status, tuple(dict.fromkeys(counted)), notes, examination.verdicts, examination.claims
    )


def _stale(path: Path, fresh: Sequence[Verdict], repo: Path) -> list[Problem]:
    """Differences between a committed verdicts.csv and the fresh verdicts."""
    shown = path.read_text(encoding="utf-8").splitlines()
    right = verdicts.to_csv(fresh).splitlines()
    extra = [line for line in right if line not in set(shown)]
    extra += [line for line in shown if line not in set(right)]
    if not extra and len(shown) == len(right):
        return []
    claim = extra[0].split(",")[0] if extra else "a row"
    reason = f"is not what the data give ({len(extra)} differing rows, first of {claim})"
    return [Problem("INVALID", _relative(path.resolve(), repo), reason)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _predicted(v: Verdict, claim: Claim | None) -> str:
    if v.q05 is not None:
        return f"{_number(v.q50)} [{_number(v.q05)}, {_number(v.q95)}] {v.unit}"
    if claim is None or claim.probability is None:
        return "-"
    limit = ""
    if claim.kind == "threshold":
        limit = f"{claim.direction} {_number(claim.threshold)} "
    elif claim.kind == "equivalence":
        centre = 1.0 if claim.threshold is None else claim.threshold
        limit = f"{_number(centre)} within {_number(claim.smallest_difference)} "
    return f"{limit}p={claim.probability:g}"


def lines(result: AuditResult) -> list[str]:
    """The audit as text: one line for each claim, then counts, notes and problems."""
    claims = {claim.id: claim for claim in result.claims}
    width = max((len(v.claim) for v in result.verdicts), default=5)
    out = [f"{'claim':<{width}}  {'predicted':<26} {'observed':<32} verdict"]
    for v in result.verdicts:
        predicted = _predicted(v, claims.get(v.claim))
        observed = "-"
        if v.observed is not None:
            observed = f"{_number(v.observed)} [{_number(v.ci_low)}, {_number(v.ci_high)}] {v.unit}"
        reason = f" ({v.reason})" if v.reason else ""
        out.append(f"{v.claim:<{width}}  {predicted:<26} {observed:<32} {v.verdict}{reason}")
    counts = Counter(v.verdict for v in result.verdicts)
    shown = ", ".join(f"{counts[name]} {name}" for name in verdicts.VERDICTS if counts[name])
    out.append(f"{len(result.verdicts)} claims: {shown or 'none'}")
    out += [f"note: {note}" for note in result.notes]
    out += [str(problem) for problem in result.problems]
    out.append(f"audit: {result.status} (exit status {result.exit_code})")
    return out


# The device that the claims are about (prereg/): a campaign of another one gives cells and floors, but no verdict.
CLAIMED_DEVICE = "NVIDIA H200"


def judge(repo: str | Path, chosen: Iterable[str | Path]) -> Examination:
    """Judge every claim of `repo/prereg` by the chosen campaigns; a claim that is not frozen ends as EXPLORATORY.

    Where no chosen campaign is of the claimed device, the newest recorded R0 campaign that is stands in.
    """
    return examine(repo, _of_claimed_device(Path(repo), [Path(folder) for folder in chosen]))


def _of_claimed_device(repo: Path, chosen: list[Path]) -> list[Path]:
    recorded = [c for c in select.recorded_campaigns(repo) if c.device_name == CLAIMED_DEVICE]
    ours = [folder for folder in chosen if folder.name in {c.id for c in recorded}]
    stand_in = [repo / select.CAMPAIGNS / c.id for c in recorded if c.rung == "R0"]
    return ours or stand_in[-1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is that of the module's table."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repo", type=Path, default=Path("."), help="default: %(default)s")
    parser.add_argument(
        "--campaign",
        type=Path,
        action="append",
        help="folder to judge by, repeatable; default: all of data/campaigns",
    )
    parser.add_argument(
        "--verdicts", type=Path, help="committed table to compare; default: reports/verdicts.csv"
    )
    options = parser.parse_args(arguments)
    repo = options.repo.resolve()
    campaigns = options.campaign or records.list_campaigns(repo / "data")
    shown = options.verdicts or repo / "reports" / "verdicts.csv"
    result = audit(repo, judge(repo, campaigns), shown)
    print("\n".join(lines(result)))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
