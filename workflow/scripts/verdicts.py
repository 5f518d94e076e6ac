"""Judge every registered claim, and write verdicts.csv with what the report needs beside it."""

from collections import Counter

from lab import audit, judgement, verdicts
from lab.files import write_json
from lab.script import logged

with logged(snakemake.log[0]) as log:
    found = audit.judge(".")
    if found.stopped:
        raise RuntimeError(str(found.stopped))
    result = audit.audit(".", found)
    for verdict, n in Counter(v.verdict for v in found.verdicts).most_common():
        log(f"{n} {verdict}")
    for verdict in found.verdicts:
        log(f"{verdict.claim}: {verdict.verdict} {verdict.reason}")

    write_json(snakemake.output.claims, [judgement.claim_json(claim) for claim in found.claims])
    write_json(snakemake.output.scores, judgement.scores_json(found))
    write_json(snakemake.output.integrity, judgement.integrity_json(result, ".", found.differing))
    verdicts.write_csv(found.verdicts, snakemake.output.verdicts)
