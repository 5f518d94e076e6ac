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
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from lab import (
    accuracy,
    analysis_r1,
    analysis_r2,
    analysis_r2b,
    campaign_audit,
    protocol,
    records,
    registry,
    report_audit,
    rungs,
    select,
    verdicts,
)
from lab.claims import Claim
from lab.registry import Git, Problem, Registered, Unverifiable
from lab.source import measured_commit
from lab.verdicts import Evidence, Verdict
from qgemm_mx.formats import DENSE_BYTES, FORMATS, bytes_per_weight

EXIT = {"OK": 0, "TAMPERED": 3, "INVALID": 4, "UNVERIFIABLE": 5}
CAMPAIGNS = select.CAMPAIGNS.as_posix()
ACCURACY = "data/accuracy"
CUDA = rungs.KERNELS.as_posix()
ANSWER = ("kernel", "format", "N", "K", "M")  # what a claim asks for, whatever its regime
NO_KERNEL = (".json", ".md")  # sidecars and prose beside the kernels


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
    notes: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()  # of the notes those on claims that campaigns judge differently
    stopped: Problem | None = None  # what nobody foresaw in the data: nothing was judged
    analyse: report_audit.Analyse | None = None  # made once for verdicts and report

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
    kernel_sources: Mapping[str, Sequence[str]] = rungs.KERNEL_SOURCES,
    rules: campaign_audit.Rules = campaign_audit.problems,
) -> Examination:
    """Load, verify and judge everything. ``campaigns`` are the folders that claims are judged by.

    Every folder of data/campaigns is verified and held against ``rules``, judged by or not.
    """
    repo = Path(repo).resolve()
    folders = sorted({Path(folder).resolve() for folder in campaigns})
    prereg = repo / "prereg"
    found = registry.verify(prereg)
    registered = registry.load_registered(prereg)
    found += [*registered.unreadable, *registry.history(repo).problems]
    found += order_problems(repo, registered, kernel_sources)
    found += unmapped_problems(repo, kernel_sources)
    tampered, removed, campaign_problems = _edited_campaigns(repo)
    found += removed
    entries = {path.name: path for path in (*campaign_audit.shelf_entries(repo), *folders)}
    shelf = campaign_audit.inspect(repo, list(entries.values()), verify_campaign, rules)
    campaign_problems += shelf.problems
    campaign_problems += accuracy_problems(repo)
    used = [f for f in folders if f.name not in shelf.invalid or _readable(f)]
    problems = tuple(dict.fromkeys(found))
    claims = registered.claims + registered.unregistered

    # Judged more than once, by all campaigns and by each alone, but read and computed once.
    analyse = cache(partial(report_audit.analysis, repo))
    analyse_r2 = cache(partial(report_audit.analysis_r2_of, repo))
    analyse_r2b = cache(partial(report_audit.analysis_r2b_of, repo))
    computed = {
        analysis_r1.RUNG: lambda folder: computed_r1(folder, repo, analyse),
        analysis_r2.RUNG: lambda folder: analyse_r2(folder).constants,
        analysis_r2b.RUNG: lambda folder: analyse_r2b(folder).constants,
    }
    read = cache(verdicts.read_legs)

    def judged_by(some: list[Path]) -> tuple[Evidence, list[Verdict]]:
        evidence = Evidence.from_campaigns(
            some,
            protocol_sha256=_frozen_protocols(prereg),
            facts=mechanical_facts(),
            invalid=shelf.invalid,
            tampered=shelf.tampered | tampered,
            computed=computed,
            read=read,
        )
        return evidence, verdicts.judge(claims, evidence, problems, registered.ids)

    try:
        evidence, judged = judged_by(used)
    except (TypeError, ValueError, LookupError, AttributeError):
        used = [f for f in used if f.name not in shelf.invalid]  # too broken to be judged by
        evidence, judged = judged_by(used)
    sound = [f for f in used if f.name not in shelf.invalid | shelf.tampered | tampered]
    notes = [
        said(f) for said in (campaign_audit.without_legs, campaign_audit.closed) for f in sound
    ]
    differing = (
        verdicts.disagreements(judged, [judged_by([f])[1] for f in sound]) if len(used) > 1 else []
    )
    return Examination(
        registered,
        problems,
        evidence,
        tuple(judged),
        tuple(campaign_problems),
        tuple(note for note in (*notes, *differing) if note),
        tuple(differing),
        analyse=analyse,
    )


def _frozen_protocols(prereg: Path) -> dict[str, str] | None:
    """SHA-256 of the frozen protocol of each part, empty for one that is not frozen; None where no protocol is."""
    frozen = registry.frozen_files(prereg)
    parts = (*(rung.id for rung in rungs.RUNGS), *rungs.PARTS)
    found = {part: frozen.get(protocol.file_of(part), "") for part in parts}
    return found if any(found.values()) else None


def computed_r1(folder: Path, repo: Path, analyse: report_audit.Analyse) -> verdicts.Computed:
    """The constants that follow from the legs of an R1 campaign, and why others are missing."""
    try:
        record = accuracy.newest(repo / "data")
    except accuracy.AccuracyError:  # without a record that can be read there is no number of it
        record = None
    return analyse(folder, record).constants


def _readable(folder: Path) -> bool:
    """Whether a campaign with problems still shows which claims it spoils."""
    try:
        Evidence.from_campaigns([folder])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


# Proofs of order.


def _edited_campaigns(repo: Path) -> tuple[dict[str, str], list[Problem], list[Problem]]:
    """Campaigns are written once: history and the working tree may only add their files.

    Gives the reason for each edited campaign, the problems of removed campaigns (which may have
    held any cell, so they touch every claim) and those of edited ones (which spoil what is judged
    by them).
    """
    reasons, removed, edited = {}, [], []
    for name in _edited_files(repo, CAMPAIGNS):
        campaign = Path(name).relative_to(CAMPAIGNS).parts[0]
        if (repo / CAMPAIGNS / campaign).exists():
            problem = Problem("TAMPERED", name, "a committed campaign was edited: it is write-once")
            edited.append(problem)
        else:
            problem = Problem("TAMPERED", name, "a committed campaign was removed")
            removed.append(problem)
        reasons[campaign] = str(problem)
    return reasons, removed, edited


def _edited_files(repo: Path, where: str) -> list[str]:
    """Files below `where` that some commit or the working tree changed or removed, after they were committed."""
    options = ("--no-renames", "--diff-filter=MTD", "--name-only")
    try:
        git = Git(repo)
        past = git.text("log", "--full-history", "-m", *options, "--format=", "--", where)
        # Not `git diff`: it trusts the index, which can be told to pass over a file.
        held = git.tree(where)
    except Unverifiable:
        return []  # history() reports it
    present = [name for name, blob in held.items() if not registry.same_bytes(repo / name, *blob)]
    return [name for name in dict.fromkeys([*past.split("\n"), *present]) if name]


def accuracy_problems(repo: Path) -> list[Problem]:
    """Records of accuracy are written once too, and each must be what its schema and its name say."""
    found = [
        Problem("TAMPERED", name, "a committed record of accuracy was edited or removed")
        for name in _edited_files(repo, ACCURACY)
        if Path(name).name == accuracy.FILE
    ]
    for path in sorted((repo / ACCURACY).glob(f"*/{accuracy.FILE}")):
        try:
            accuracy.load(path.parent)
        except accuracy.AccuracyError as error:
            found.append(Problem("INVALID", f"{ACCURACY}/{path.parent.name}", str(error)))
    return found


def order_problems(
    repo: str | Path,
    registered: Registered,
    kernel_sources: Mapping[str, Sequence[str]] = rungs.KERNEL_SOURCES,
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
    campaigns, heads, ever = _recorded(repo), _heads(repo), _kernel_files(repo)
    answers = {name: _Answers.of(record) for name, record in campaigns.items()}
    table = {
        kernel: [f for f in ever if any(fnmatchcase(f, glob) for glob in globs)]
        for kernel, globs in kernel_sources.items()
    }
    problems: list[Problem] = []
    added = cache(lambda path: (git.commits(path, added=True) or [None])[0])
    for file, claims in files.items():
        try:
            frozen = registry.freeze_commit(git, file)
            for source in sorted({s for claim in claims for s in _sources(claim, table)}):
                first = added(source)
                if first and (first == frozen or not git.is_ancestor(frozen, first)):
                    about = [c.id for c in claims if source in _sources(c, table)]
                    reason = f"{source} came with commit {first[:12]}, not after the freeze"
                    problems.append(Problem("TAMPERED", file, reason, tuple(about)))
            for name, record in campaigns.items():
                about = tuple(claim.id for claim in claims if answers[name].hold(claim))
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
    commit = measured_commit(git.repo, record["source"]) or record["source"].get("commit")
    head = record.get("prereg_head")
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


def _kernel_files(repo: Path) -> list[str]:
    """Every CUDA file that the history or the disk holds or held, and all else among the kernels."""
    where = ("*.cu", "*.cuh", f"{CUDA}/")
    options = ("--no-renames", "--diff-filter=A", "--name-only", "--format=")
    found = {p.relative_to(repo).as_posix() for p in (repo / CUDA).rglob("*") if p.is_file()}
    try:
        past = Git(repo).text("log", "--full-history", "-m", *options, "--", *where)
        found.update(past.split("\n"))
    except Unverifiable:
        pass  # history() reports it
    return sorted(f for f in found if f and not f.endswith(NO_KERNEL) and "__pycache__" not in f)


def unmapped_problems(
    repo: Path, kernel_sources: Mapping[str, Sequence[str]] = rungs.KERNEL_SOURCES
) -> list[Problem]:
    """Sources that belong to no kernel id: nothing proves that claims about what they hold came first."""
    globs = {glob for some in kernel_sources.values() for glob in some}
    globs.update(rungs.INSTRUMENT_SOURCES)
    reason = "belongs to no kernel of lab.rungs.KERNEL_SOURCES: no order can be proved of it"
    return [
        Problem("INVALID", file, reason)
        for file in _kernel_files(repo)
        if not any(fnmatchcase(file, glob) for glob in globs)
    ]


def _recorded(repo: Path) -> dict[str, dict[str, Any]]:
    """All campaigns, pilots too: a pilot shows a cell's answer just as well.

    One that is not of the right types is left out: records.verify reports it.
    """
    found = {}
    for path in sorted((repo / CAMPAIGNS).glob("[!.]*/campaign.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _well_typed(record):
            found[path.parent.name] = record
    return found


def _well_typed(record: Mapping[str, Any]) -> bool:
    def text(value: Any) -> bool:
        return value is None or isinstance(value, str)

    def rows(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(row, dict) for row in value)

    source = record.get("source")
    return (
        isinstance(source, dict)
        and text(source.get("commit"))
        and text(source.get("stated_commit"))
        and text(record.get("prereg_head"))
        and isinstance(record.get("constants", {}), dict)
        and rows(record.get("cells", []))
        and rows(record.get("checks", []))
    )


def _heads(repo: Path) -> dict[str, set[str]]:
    """Hash of each manifest line -> the files that are frozen by then."""
    known: set[str] = set()
    heads: dict[str, set[str]] = {}
    for line, entry in registry.read_manifest(repo / "prereg"):
        known = known | {file["path"] for file in entry["files"]}
        heads[registry.sha256(line)] = known
    return heads


@dataclass(frozen=True)
class _Answers:
    """What a campaign holds a number of."""

    rung: str
    constants: frozenset[str]
    cells: frozenset[tuple[Any, ...]]
    checks: frozenset[tuple[Any, ...]]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> _Answers:
        def keys(rows: Iterable[Mapping[str, Any]]) -> frozenset[tuple[Any, ...]]:
            found = (tuple(row.get(key) for key in ANSWER) for row in rows)
            return frozenset(k for k in found if all(isinstance(v, str | int) for v in k))

        names = {part for key in record.get("constants", {}) for part in _names(key)}
        cells, checks = keys(record.get("cells", [])), keys(record.get("checks", []))
        return cls(str(record.get("rung")), frozenset(names), cells, checks)

    def hold(self, claim: Claim) -> bool:
        """Whether a number of them answers the claim."""
        estimand = claim.estimand
        if estimand.quantity in ("constant", "external", "share"):
            asked = set(estimand.items) or {estimand.name}
            given = {part.RUNG: part.gives for part in (analysis_r1, analysis_r2, analysis_r2b)}
            computed = self.rung in given and any(map(given[self.rung], asked))
            return computed or not self.constants.isdisjoint(asked)
        measured = self.checks if estimand.quantity == "check" else self.cells
        return any(tuple(getattr(c, key) for key in ANSWER) in measured for c in estimand.cells)


def _names(constant: str) -> tuple[str, ...]:
    """Under which names claims ask for a constant: its own, and the cause of a share."""
    return (constant, constant.split("/")[1]) if constant.startswith("share/") else (constant,)


# The audit.


def audit(
    repo: str | Path,
    examination: Examination,
    shown: str | Path | None = None,
) -> AuditResult:
    """Weigh what was found. ``shown``: the committed verdicts.csv; with it, the report is held against the data."""
    repo = Path(repo).resolve()
    problems = list(examination.integrity) + list(examination.campaign_problems)
    unsound: dict[tuple[str, str], list[str]] = {}
    for v in examination.verdicts:
        if v.verdict == "INVALID" and not v.reason.startswith(campaign_audit.SEE):
            unsound.setdefault((v.campaign or "?", v.reason), []).append(v.claim)
    for (campaign, reason), ids in unsound.items():
        problems.append(Problem("INVALID", campaign, reason, tuple(ids)))
    if shown is not None and examination.stopped is None:
        try:
            problems += report_audit.problems(
                repo, examination.verdicts, Path(shown).absolute(), examination.analyse
            )
        except Exception as error:
            reason = f"cannot be audited: {type(error).__name__}: {error}"
            problems.append(Problem("INVALID", report_audit.REPORTS, reason))
    notes = tuple(str(p) for p in problems if p.status == "UNREGISTERED") + examination.notes
    counted = [p for p in problems if p.status != "UNREGISTERED"]
    statuses = {problem.status for problem in counted}
    status = next((s for s in ("TAMPERED", "INVALID", "UNVERIFIABLE") if s in statuses), "OK")
    return AuditResult(
        status, tuple(dict.fromkeys(counted)), notes, examination.verdicts, examination.claims
    )


# What is printed.

WIDTH = 158  # of a line; a longer one goes on, indented, below
HEADER = ("claim", "predicted: median [90% band]", "observed [95% interval]", "verdict")
UNITS = {"us": "µs", "M": "tokens"}
# One line a claim, repeated after the totals; and those that a reason stops, one line a reason.
FAILED = ("REFUTED", "MISS")
STOPPED = ("INVALID", "DEVIATED", "TAMPERED")
ALL_LINES = "all lines: --config audit=full, or --all of python -m lab.audit"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _predicted(v: Verdict, claim: Claim | None) -> str:
    if v.q05 is not None:
        unit = UNITS.get(v.unit, v.unit)
        return f"{_number(v.q50)} [{_number(v.q05)}, {_number(v.q95)}] {unit}"
    if claim is None or claim.probability is None:
        return "-"
    limit = ""
    if claim.kind == "threshold":
        limit = f"{claim.direction} {_number(claim.threshold)} "
    elif claim.kind == "equivalence":
        centre = 1.0 if claim.threshold is None else claim.threshold
        limit = f"{_number(centre)} within {_number(claim.smallest_difference)} "
    return f"{limit}chance {claim.probability:g}"


def _observed(v: Verdict) -> str:
    if v.observed is None:
        return "-"
    if v.unit == "bool":
        return "passed" if v.observed else "failed"
    unit = UNITS.get(v.unit, v.unit)
    return f"{_number(v.observed)} [{_number(v.ci_low)}, {_number(v.ci_high)}] {unit}"


def _stopped(v: Verdict) -> str:
    """The reason of a stopped claim in the words of the problem that stopped it, where there is one."""
    return (
        v.reason
        if v.reason.startswith("TAMPERED: ")
        else str(Problem(v.verdict, v.campaign or "?", v.reason))
    )


def lines(result: AuditResult, full: bool = False) -> list[str]:
    """The audit as text: a line for each claim, counts, failures again, notes, problems and the status.

    Claims that are not run are counted by family, unless `full`. A reason that stops many claims is given once.
    """
    claims = {claim.id: claim for claim in result.claims}
    rows = [(v.claim, _predicted(v, claims.get(v.claim)), _observed(v)) for v in result.verdicts]
    shown = [full or v.verdict != "NOT_RUN" for v in result.verdicts]
    printed = [HEADER[:3], *(row for row, yes in zip(rows, shown, strict=True) if yes)]
    widths = [max(map(len, column)) for column in zip(*printed, strict=True)]

    def table_row(cells: Sequence[str], verdict: str) -> str:
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
        return "  ".join([*padded, verdict])

    out = [table_row(HEADER[:3], HEADER[3])]
    failed: list[str] = []
    waiting: Counter[str] = Counter()
    stopped: dict[str, list[str]] = {}
    for v, row, yes in zip(result.verdicts, rows, shown, strict=True):
        if v.verdict in STOPPED:
            stopped.setdefault(_stopped(v), []).append(v.claim)
        if v.verdict in FAILED:
            failed.append(table_row(row, v.verdict))
        if yes:
            out.append(table_row(row, v.verdict))
            if v.reason and v.verdict not in STOPPED:
                out[-1:] = _beside(out[-1], f"({v.reason})")
        else:
            claim = claims.get(v.claim)
            waiting[claim.family if claim else v.claim.rpartition(".")[0]] += 1
    if waiting:
        out.append(f"NOT_RUN, by family ({ALL_LINES}):")
        out += [f"  {n:>4}  {family}" for family, n in sorted(waiting.items())]
    counts = Counter(v.verdict for v in result.verdicts)
    totals = ", ".join(f"{counts[name]} {name}" for name in verdicts.VERDICTS if counts[name])
    out.append(f"{len(result.verdicts)} claims: {totals or 'none'}")
    if failed or stopped:
        out.append("failures:")
    out += failed
    out += [f"{reason} [{_how_many(ids)}]" for reason, ids in stopped.items()]
    out += [f"note: {note}" for note in result.notes]
    out += [said for said in dict.fromkeys(map(str, result.problems)) if said not in stopped]
    out.append(f"audit: {result.status} (exit status {result.exit_code})")
    return [part for line in out for part in _folded(line)]


def _beside(row: str, reason: str) -> list[str]:
    whole = f"{row} {reason}"
    return [whole] if len(whole) <= WIDTH else [row, f"    {reason}"]


def _how_many(ids: Sequence[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{len(ids)} claims, first {ids[0]}"


def _folded(line: str) -> list[str]:
    """A line of at most WIDTH characters and its continuations; a word, such as a path, is never cut."""
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# The device that the claims are about (prereg/): a campaign of another one gives cells and floors, but no verdict.
CLAIMED_DEVICE = "NVIDIA H200"


def judge(repo: str | Path, chosen: Iterable[str | Path] | None = None) -> Examination:
    """Judge every claim of `repo/prereg` by all recorded campaigns of the claimed device, pilots left out.

    The newest that holds all cells of a claim decides it. `chosen` narrows them to some, where one of those is of the
    device. A claim that is not frozen ends as EXPLORATORY. What nobody foresaw in the data ends as one INVALID.
    """
    try:
        return examine(repo, _of_claimed_device(Path(repo), chosen))
    except Exception as error:
        reason = f"the audit cannot go on: {type(error).__name__}: {error}"
        stopped = Problem("INVALID", "prereg or data/campaigns", reason)
        nothing = Registered((), (), (), (), ())
        return Examination(nothing, (), Evidence(), (), (stopped,), stopped=stopped)


def _of_claimed_device(repo: Path, chosen: Iterable[str | Path] | None) -> list[Path]:
    ours = [
        repo / CAMPAIGNS / name
        for name, record in _recorded(repo).items()
        if record.get("kind") == "campaign"
        and isinstance(record.get("device"), dict)
        and record["device"].get("name") == CLAIMED_DEVICE
    ]
    names = {Path(folder).name for folder in chosen or ()}
    return [folder for folder in ours if folder.name in names] or ours


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
    parser.add_argument(
        "--all", action="store_true", help="a line for each claim that is not run, too"
    )
    options = parser.parse_args(arguments)
    repo = options.repo.resolve()
    campaigns = options.campaign or records.list_campaigns(repo / "data")
    shown = options.verdicts or repo / "reports" / "verdicts.csv"
    result = audit(repo, judge(repo, campaigns), shown)
    print("\n".join(lines(result, full=options.all)))
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
