# qgemm-mx: from frozen predictions to an audited report.
# Targets: report (default), audit, build, all, r0_instrument, r1_decomposition, r2_kernel, r3_moe_dsl,
#          pack_campaign, import_campaign, readme.   The README says what each does.

import os
import sys
import time
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version, validate

min_version("9.20")

REPO = Path(workflow.basedir)
SOURCES = [str(REPO / "kernels"), str(REPO / "workflow")]
sys.path[:0] = SOURCES
# The scripts run in processes of their own and find `qgemm_mx` and `lab` the same way, before anything the user has there.
os.environ["PYTHONPATH"] = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])

from lab import files, rungs, select


configfile: "workflow/config.yaml"


validate(config, "workflow/schemas/config.schema.json")

try:
    R0 = select.plan(config, REPO)
except select.SelectError as error:
    raise WorkflowError(str(error)) from None
if workflow.is_main_process:
    print(R0.say, file=sys.stderr)


include: "workflow/rules/common.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/judge.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/audit.smk"


AUDIT_STATUS = Path(rules.audit.params.status)


onstart:
    AUDIT_STATUS.unlink(missing_ok=True)


onerror:
    # The audit's own exit status (3, 4 or 5) becomes that of the whole run.
    if AUDIT_STATUS.exists():
        raise SystemExit(int(AUDIT_STATUS.read_text()))


localrules:
    default,
    all,
    build,
    r0_instrument,
    r1_decomposition,
    r2_kernel,
    r3_moe_dsl,


rule default:
    input:
        rules.report.output,


rule all:
    input:
        rules.build.input,
        rules.report.output,


rule r0_instrument:
    input:
        measured_rung("R0"),
        rules.build.input,
        rules.cells.output,


rule r1_decomposition:
    input:
        measured_rung("R1"),


rule r2_kernel:
    input:
        measured_rung("R2"),


rule r3_moe_dsl:
    input:
        measured_rung("R3"),
