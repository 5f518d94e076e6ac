# From campaigns to numbers and verdicts. The only rule that reads predictions is `verdicts`, and it touches no GPU.

POINTERS = [f"{WORK}/r0/campaign.json"]


rule cells:
    input:
        pointers=POINTERS,
        campaigns=REPLAYED_FILES,
    output:
        cells="reports/cells.csv",
    log:
        f"{WORK}/logs/cells.log",
    benchmark:
        f"{WORK}/benchmarks/cells.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=1000,
    params:
        lab=LAB_DIGEST,
    message:
        "Writing {output.cells}"
    script:
        "../scripts/cells.py"


rule verdicts:
    input:
        pointers=POINTERS,
        # Not only the one that the report shows: claims are judged by all campaigns of their device.
        campaigns=repository_files(f"{select.CAMPAIGNS}/[!.]*/*"),
        prereg=PREREG_FILES,
    output:
        verdicts="reports/verdicts.csv",
        claims=f"{WORK}/judge/claims.json",
        scores=f"{WORK}/judge/scores.json",
        integrity=f"{WORK}/judge/integrity.json",
    log:
        f"{WORK}/logs/verdicts.log",
    benchmark:
        f"{WORK}/benchmarks/verdicts.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        lab=LAB_DIGEST,
    message:
        "Judging the claims"
    script:
        "../scripts/verdicts.py"
