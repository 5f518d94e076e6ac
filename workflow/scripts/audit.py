"""Print predicted against observed for every claim, with its verdict, and end with the status that the audit gives."""

from pathlib import Path

from lab import audit
from lab.files import write_text
from lab.script import logged

with logged(snakemake.log[0]) as log:
    found = audit.judge(".")
    result = audit.audit(".", found, shown=snakemake.params.shown)
    text = "\n".join(audit.lines(result, full=snakemake.params.full))
    print(text, flush=True)
    log(text)
    if result.exit_code:
        write_text(Path(snakemake.params.status), f"{result.exit_code}\n")

if result.exit_code:
    raise SystemExit(result.exit_code)
