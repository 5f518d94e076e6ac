# From CUDA sources to checked cubins. No GPU, no predictions.

# Testbed and product are compiled for the device that measures; without one, for the architecture they were written for.
TESTBED_ARCHITECTURE = R1.architecture or "sm_90a"
PRODUCT_ARCHITECTURE = R2.architecture or R2B.architecture or "sm_90a"


rule build:
    input:
        f"{WORK}/build/builds.json",
        f"{WORK}/build/sass.json",
        f"{WORK}/build/occupancy.csv",


rule build_cubins:
    input:
        without_a_flag,
        sources=repository_files("kernels/qgemm_mx/cuda/*"),
    output:
        builds=f"{WORK}/build/builds.json",
        cubins=directory(expand(f"{WORK}/build/{{arch}}", arch=config["architectures"])),
    log:
        f"{WORK}/logs/build_cubins.log",
    benchmark:
        f"{WORK}/benchmarks/build_cubins.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
    params:
        architectures=config["architectures"],
        cache=f"{WORK}/cache/cubins",
        kernels=KERNEL_DIGEST,
    message:
        "Compiling the kernels for {params.architectures}"
    script:
        "../scripts/build_cubins.py"


# Not part of `build`, nor of the report: over a hundred entries take minutes, and only measuring R1 needs them.
rule build_testbed:
    input:
        builds=rules.build_cubins.output.builds,
        cubins=rules.build_cubins.output.cubins,
        sources=repository_files("kernels/qgemm_mx/cuda/*"),
    output:
        builds=f"{WORK}/build_testbed/builds.json",
        cubins=directory(f"{WORK}/build_testbed/{TESTBED_ARCHITECTURE}"),
    log:
        f"{WORK}/logs/build_testbed.log",
    benchmark:
        f"{WORK}/benchmarks/build_testbed.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=4000,
    params:
        architecture=TESTBED_ARCHITECTURE,
        cache=f"{WORK}/cache/cubins",
        kernels=KERNEL_DIGEST,
    message:
        "Compiling the variants of the testbed for {params.architecture} (minutes)"
    script:
        "../scripts/build_testbed.py"


# Not part of `build` either: a user of the library compiles at the first use, and only measuring R2 needs it here.
rule build_product:
    input:
        builds=rules.build_cubins.output.builds,
        cubins=rules.build_cubins.output.cubins,
        sources=repository_files("kernels/qgemm_mx/cuda/*"),
    output:
        builds=f"{WORK}/build_product/builds.json",
        cubins=directory(f"{WORK}/build_product/{PRODUCT_ARCHITECTURE}"),
    log:
        f"{WORK}/logs/build_product.log",
    benchmark:
        f"{WORK}/benchmarks/build_product.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=4000,
    params:
        architecture=PRODUCT_ARCHITECTURE,
        cache=f"{WORK}/cache/cubins",
        kernels=KERNEL_DIGEST,
    message:
        "Compiling the product and its ablation for {params.architecture} (minutes)"
    script:
        "../scripts/build_product.py"


rule check_sass:
    input:
        builds=rules.build_cubins.output.builds,
        cubins=rules.build_cubins.output.cubins,
    output:
        sass=f"{WORK}/build/sass.json",
    log:
        f"{WORK}/logs/check_sass.log",
    benchmark:
        f"{WORK}/benchmarks/check_sass.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=1000,
    message:
        "Checking the instructions that the kernels promise"
    script:
        "../scripts/check_sass.py"


rule occupancy:
    input:
        builds=rules.build_cubins.output.builds,
        protocol="prereg/protocol.json",
    output:
        table=f"{WORK}/build/occupancy.csv",
    log:
        f"{WORK}/logs/occupancy.log",
    benchmark:
        f"{WORK}/benchmarks/occupancy.tsv"
    conda:
        "../../environment.yml"
    resources:
        mem_mb=1000,
    message:
        "Computing the occupancy table"
    script:
        "../scripts/occupancy.py"
