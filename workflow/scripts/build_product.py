"""Compile and check the product and its ablation for one architecture, and lay them beside the other kernels."""

from lab import extra_builds
from lab.script import logged

with logged(snakemake.log[0]) as log:
    extra_builds.build(snakemake, "product", extra_builds.is_product, log)
