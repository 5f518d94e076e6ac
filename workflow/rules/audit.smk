# Predicted against observed for every claim, printed; and the carrying of campaigns between machines.
# None of these has an output: each does its work anew whenever it is asked for. Nor has any a benchmark file, then.


# No inputs either: the audit looks at the committed tables as they are, and never measures or renders first.
rule audit:
    log:
        f"{WORK}/logs/audit.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        full=config["audit"] == "full",
        shown="reports/verdicts.csv",
        # Snakemake ends with 1 whatever a rule ended with: the script leaves its exit status here for `onerror`.
        status=f"{WORK}/audit_status",
    message:
        "Auditing predicted against observed"
    script:
        "../scripts/audit.py"


rule pack_campaign:
    input:
        campaign=campaign_to_pack,
    log:
        f"{WORK}/logs/pack_campaign.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=500,
    params:
        archive=config["archive"],
    message:
        "Packing a campaign into {params.archive}"
    script:
        "../scripts/pack_campaign.py"


rule import_campaign:
    input:
        archive=archive_to_import,
    log:
        f"{WORK}/logs/import_campaign.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=500,
    message:
        "Importing {input.archive}"
    script:
        "../scripts/import_campaign.py"
