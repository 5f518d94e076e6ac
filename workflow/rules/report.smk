# From tables to pictures and the page.


rule figures:
    input:
        cells=rules.cells.output.cells,
        verdicts=rules.verdicts.output.verdicts,
        claims=rules.verdicts.output.claims,
        pointers=POINTERS,
        accuracy=repository_files("data/accuracy/**/*.json"),
        r1=rules.analysis_r1.output.found,
        r2=rules.analysis_r2.output.found,
        r2b=rules.analysis_r2b.output.found,
        shapes="prereg/shapes.json",
    output:
        figures=directory("reports/figures"),
    log:
        f"{WORK}/logs/figures.log",
    benchmark:
        f"{WORK}/benchmarks/figures.tsv"
    conda:
        "../../environment.yml"
    threads: 2
    resources:
        mem_mb=2000,
    params:
        lab=LAB_DIGEST,
    message:
        "Drawing the figures"
    script:
        "../scripts/figures.py"


rule report:
    input:
        cells=rules.cells.output.cells,
        verdicts=rules.verdicts.output.verdicts,
        claims=rules.verdicts.output.claims,
        scores=rules.verdicts.output.scores,
        integrity=rules.verdicts.output.integrity,
        figures=rules.figures.output.figures,
        # In the sums that this rule writes last.
        r1=rules.analysis_r1.output,
        r2=rules.analysis_r2.output,
        r2b=rules.analysis_r2b.output,
        r1_found=rules.analysis_r1.output.found,
        r2_found=rules.analysis_r2.output.found,
        r2b_found=rules.analysis_r2b.output.found,
        accuracy=repository_files("data/accuracy/**/*.json"),
        pointers=POINTERS,
        builds=rules.build_cubins.output.builds,
        sass=rules.check_sass.output.sass,
        occupancy=rules.occupancy.output.table,
        shapes="prereg/shapes.json",
        protocols=repository_files("prereg/protocol*.json"),
        requirements=repository_files("requirements*.txt"),
    output:
        html="reports/index.html",
        sums="reports/SHA256SUMS.json",
    log:
        f"{WORK}/logs/report.log",
    benchmark:
        f"{WORK}/benchmarks/report.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        lab=LAB_DIGEST,
    message:
        "Rendering {output.html}"
    script:
        "../scripts/report.py"


# Not part of the report: README.md is written by people, and only its marked blocks are filled from the tables.
rule readme:
    input:
        cells=rules.cells.output.cells,
        verdicts=rules.verdicts.output.verdicts,
        r1=rules.analysis_r1.output,
        r2=rules.analysis_r2.output,
        r2b=rules.analysis_r2b.output,
        r1_found=rules.analysis_r1.output.found,
        r2_found=rules.analysis_r2.output.found,
        r2b_found=rules.analysis_r2b.output.found,
    log:
        f"{WORK}/logs/readme.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=500,
    message:
        "Filling the numbers of README.md"
    script:
        "../scripts/readme.py"
