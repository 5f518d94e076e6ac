# From campaigns to numbers and verdicts. The only rule that reads predictions is `verdicts`, and it touches no GPU.

# A rung without a campaign has no pointer, but for R0: its pointer then says so.
POINTERS = [f"{WORK}/r0/campaign.json"]
for rung in ("R1", "R2", "R2b"):
    if rung in PLANS and PLANS[rung].action != "nothing":
        POINTERS.append(f"{WORK}/{rung.lower()}/campaign.json")


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
    priority: 5  # figures wait for it, and not for what is built
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
        accuracy=repository_files("data/accuracy/**/*.json"),
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
    # The longest of those that wait for nothing: begun last, it would run alone.
    priority: 10
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


# Reads no prediction: what R1 measured is the same whatever was claimed.
rule analysis_r1:
    input:
        pointers=POINTERS,
        campaigns=REPLAYED_FILES,
        accuracy=repository_files("data/accuracy/**/*.json"),
        shapes="prereg/shapes.json",
    output:
        causes="reports/r1_causes.csv",
        experiments="reports/r1_experiments.csv",
        interactions="reports/r1_interactions.csv",
        production="reports/r1_production.csv",
        # For the rules that draw and print it: to work it out takes seconds each time.
        found=f"{WORK}/analysis/r1.pickle",
    log:
        f"{WORK}/logs/analysis_r1.log",
    benchmark:
        f"{WORK}/benchmarks/analysis_r1.tsv"
    priority: 5  # figures wait for it, and not for what is built
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        lab=LAB_DIGEST,
    message:
        "Splitting the gap of R1 into causes"
    script:
        "../scripts/analysis_r1.py"


# Reads no prediction either: bars were set by the project, and claims about them are judged above.
rule analysis_r2:
    input:
        pointers=POINTERS,
        campaigns=REPLAYED_FILES,
        # The asymptotic read bandwidth is of a campaign that measured it; the regret is over both parts of R2.
        others=repository_files(f"{select.CAMPAIGNS}/[!.]*/*"),
        shapes="prereg/shapes.json",
    output:
        ablation="reports/r2_ablation.csv",
        bars="reports/r2_bars.csv",
        chain="reports/r2_chain.csv",
        decode="reports/r2_decode.csv",
        found=f"{WORK}/analysis/r2.pickle",
    log:
        f"{WORK}/logs/analysis_r2.log",
    benchmark:
        f"{WORK}/benchmarks/analysis_r2.tsv"
    priority: 5  # figures wait for it, and not for what is built
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        lab=LAB_DIGEST,
    message:
        "Holding the decode kernel of R2 against its bars"
    script:
        "../scripts/analysis_r2.py"


# The other part of R2: the matrix kernel from M = 16 to prefill.
rule analysis_r2b:
    input:
        pointers=POINTERS,
        campaigns=REPLAYED_FILES,
        # Its regret is one number over both parts; what the device reaches may be of a campaign that measured it.
        others=repository_files(f"{select.CAMPAIGNS}/[!.]*/*"),
        shapes="prereg/shapes.json",
    output:
        ablation="reports/r2b_ablation.csv",
        bars="reports/r2b_bars.csv",
        cells="reports/r2b_cells.csv",
        crossover="reports/r2b_crossover.csv",
        power="reports/r2b_power.csv",
        found=f"{WORK}/analysis/r2b.pickle",
    log:
        f"{WORK}/logs/analysis_r2b.log",
    benchmark:
        f"{WORK}/benchmarks/analysis_r2b.tsv"
    priority: 5  # figures wait for it, and not for what is built
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        lab=LAB_DIGEST,
    message:
        "Holding the matrix kernel of R2 against its bars"
    script:
        "../scripts/analysis_r2b.py"
