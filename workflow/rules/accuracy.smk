# What the formats cost in accuracy, on a small public model: CPU only, and no prediction is read.
# No outputs, as with campaigns: measuring adds a folder under data/accuracy once, and Snakemake never owns it.


rule accuracy:
    log:
        f"{WORK}/logs/accuracy.log",
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    message:
        "Measuring the accuracy of the formats (seconds; needs requirements-accuracy.txt)"
    script:
        "../scripts/accuracy.py"
