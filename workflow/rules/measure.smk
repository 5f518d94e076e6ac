# Which campaign a rung is read from: a new one measured here, or a recorded one. The choice is made in the Snakefile.
# No rule has an output under data/: measuring adds a campaign folder there once, and Snakemake never owns it.

if R0.action == "measure":

    rule measure_r0:
        input:
            without_a_flag,
            builds=rules.build_cubins.output.builds,
            cubins=rules.build_cubins.output.cubins,
            sass=rules.check_sass.output.sass,
            protocol="prereg/protocol.json",
            shapes="prereg/shapes.json",
        output:
            pointer=f"{WORK}/r0/campaign.json",
        log:
            f"{WORK}/logs/measure_r0.log",
        benchmark:
            f"{WORK}/benchmarks/measure_r0.tsv"
        conda:
            "../../environment.yml"
        resources:
            gpu=1,
            mem_mb=16000,
        params:
            # Never the same twice: when measuring was decided, an older pointer is no reason not to.
            request=time.time_ns(),
            cubin_dir=f"{WORK}/build/{R0.architecture}",
        message:
            "Measuring R0 (about 9 minutes on an H200; Ctrl-C keeps what was taken)"
        script:
            "../scripts/measure_r0.py"

else:

    rule select_r0:
        input:
            without_a_flag,
            campaign=campaign_files(R0),
        output:
            pointer=f"{WORK}/r0/campaign.json",
        log:
            f"{WORK}/logs/select_r0.log",
        benchmark:
            f"{WORK}/benchmarks/select_r0.tsv"
        conda:
            "../../environment.yml"
        resources:
            mem_mb=500,
        params:
            campaign=R0.campaign,
        message:
            "Replaying {params.campaign}"
        script:
            "../scripts/select_r0.py"


if R1.action == "measure":

    rule measure_r1:
        input:
            without_a_flag,
            builds=rules.build_testbed.output.builds,
            cubins=rules.build_testbed.output.cubins,
            protocol="prereg/protocol_r1.json",
            shapes="prereg/shapes.json",
        output:
            pointer=f"{WORK}/r1/campaign.json",
        log:
            f"{WORK}/logs/measure_r1.log",
        benchmark:
            f"{WORK}/benchmarks/measure_r1.tsv"
        conda:
            "../../environment.yml"
        resources:
            gpu=1,
            mem_mb=32000,
        params:
            # Never the same twice, as with R0.
            request=time.time_ns(),
            minutes=config["minutes"],
        message:
            "Measuring R1 (under 30 minutes on an H200; --config minutes=9 takes a piece, Ctrl-C keeps what was taken)"
        script:
            "../scripts/measure_r1.py"

elif R1.action == "replay":

    rule select_r1:
        input:
            without_a_flag,
            campaign=campaign_files(R1),
        output:
            pointer=f"{WORK}/r1/campaign.json",
        log:
            f"{WORK}/logs/select_r1.log",
        benchmark:
            f"{WORK}/benchmarks/select_r1.tsv"
        conda:
            "../../environment.yml"
        resources:
            mem_mb=500,
        params:
            campaign=R1.campaign,
        message:
            "Replaying {params.campaign}"
        script:
            "../scripts/select_r1.py"


if R2.action == "measure":

    rule measure_r2:
        input:
            without_a_flag,
            builds=rules.build_product.output.builds,
            cubins=rules.build_product.output.cubins,
            protocol="prereg/protocol_r2.json",
            shapes="prereg/shapes.json",
        output:
            pointer=f"{WORK}/r2/campaign.json",
        log:
            f"{WORK}/logs/measure_r2.log",
        benchmark:
            f"{WORK}/benchmarks/measure_r2.tsv"
        conda:
            "../../environment.yml"
        resources:
            gpu=1,
            mem_mb=32000,
        params:
            # Never the same twice, as with R0.
            request=time.time_ns(),
            minutes=config["minutes"],
        message:
            "Measuring R2 (about 8 minutes on an H200; --config minutes=5 takes a piece, Ctrl-C keeps what was taken)"
        script:
            "../scripts/measure_r2.py"

elif R2.action == "replay":

    rule select_r2:
        input:
            without_a_flag,
            campaign=campaign_files(R2),
        output:
            pointer=f"{WORK}/r2/campaign.json",
        log:
            f"{WORK}/logs/select_r2.log",
        benchmark:
            f"{WORK}/benchmarks/select_r2.tsv"
        conda:
            "../../environment.yml"
        resources:
            mem_mb=500,
        params:
            campaign=R2.campaign,
        message:
            "Replaying {params.campaign}"
        script:
            "../scripts/select_r2.py"


if R2B.action == "measure":

    rule measure_r2b:
        input:
            without_a_flag,
            builds=rules.build_product.output.builds,
            cubins=rules.build_product.output.cubins,
            protocol="prereg/protocol_r2b.json",
            shapes="prereg/shapes.json",
        output:
            pointer=f"{WORK}/r2b/campaign.json",
        log:
            f"{WORK}/logs/measure_r2b.log",
        benchmark:
            f"{WORK}/benchmarks/measure_r2b.tsv"
        conda:
            "../../environment.yml"
        resources:
            gpu=1,
            mem_mb=32000,
        params:
            # Never the same twice, as with R0.
            request=time.time_ns(),
            minutes=config["minutes"],
            close=config["close"],
        message:
            "Measuring R2b (about 10 minutes on an H200; --config minutes=9 takes a piece, Ctrl-C keeps what was taken)"
        script:
            "../scripts/measure_r2b.py"

elif R2B.action == "replay":

    rule select_r2b:
        input:
            without_a_flag,
            campaign=campaign_files(R2B),
        output:
            pointer=f"{WORK}/r2b/campaign.json",
        log:
            f"{WORK}/logs/select_r2b.log",
        benchmark:
            f"{WORK}/benchmarks/select_r2b.tsv"
        conda:
            "../../environment.yml"
        resources:
            mem_mb=500,
        params:
            campaign=R2B.campaign,
        message:
            "Replaying {params.campaign}"
        script:
            "../scripts/select_r2b.py"
