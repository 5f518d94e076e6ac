# qgemm-mx: from frozen predictions to an audited report.
# Targets: report (default), audit, build, all, r0_instrument, r1_decomposition, r2_kernel, r3_moe_dsl,
#          pack_campaign, import_campaign, accuracy, readme.   The README says what each does.

import os
import sys
import time
from pathlib import Path

import yaml
from snakemake.utils import min_version

min_version("9.20")

REPO = Path(workflow.basedir)
SOURCES = [str(REPO / "kernels"), str(REPO / "workflow")]
sys.path[:0] = SOURCES

from lab import files, rungs, select
from lab.script import one_sentence, prepend_python_path

# The scripts run in processes of their own and find `qgemm_mx` and `lab` there too, before anything of the user's.
prepend_python_path(SOURCES)


# Snakemake finds a default profile only beside the Snakefile, where this project has none: the resource limits of ours are
# applied here, so that a plain `snakemake` never lets two measurements share a device. --resources on the command line wins.
PROFILE = yaml.safe_load((REPO / "workflow/profiles/default/config.yaml").read_text())
for name, limit in (text.split("=") for text in PROFILE["resources"]):
    workflow.resource_settings.resources.setdefault(name, int(limit))


configfile: "workflow/config.yaml"


# A single architecture or several, as they are typed on a command line.
if isinstance(config["architectures"], str):
    config["architectures"] = config["architectures"].split(",")
# On a command line null, true and false are text.
WORDS = {"null": None, "true": True, "false": False}
config.update(
    {
        name: WORDS[value]
        for name, value in config.items()
        if isinstance(value, str) and value in WORDS
    }
)

with one_sentence(select.SelectError):
    select.check_settings(config, files.read_json(REPO / "workflow/schemas/config.schema.json"))
    # Only what the command line asks for is measured. Jobs in processes of their own do not see that line.
    if workflow.is_main_process:
        os.environ[select.ASKED_VARIABLE] = ",".join(select.asked_rungs(sys.argv[1:]))
    ASKED = os.environ.get(select.ASKED_VARIABLE, "R0").split(",")
    PLANS = select.plans(config, REPO, ASKED)
R0, R1, R2, R2B = (PLANS[rung] for rung in ("R0", "R1", "R2", "R2b"))
if workflow.is_main_process:
    for rung, plan in PLANS.items():
        if rung in ("R0", *ASKED) or plan.action != "nothing":
            print(plan.say, file=sys.stderr)
    for folder in select.unreadable(REPO):
        print(f"{folder} cannot be read and is left out: see the audit", file=sys.stderr)


include: "workflow/rules/common.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/judge.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/audit.smk"
include: "workflow/rules/accuracy.smk"


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
        rules.report.output,


rule r2_kernel:
    input:
        measured_rung("R2"),
        rules.report.output,


rule r3_moe_dsl:
    input:
        measured_rung("R3"),
