"""Compile and check the testbed for one architecture, and lay its cubins beside those of the other kernels."""

from lab import extra_builds
from lab.script import logged

with logged(snakemake.log[0]) as log:
    extra_builds.build(snakemake, "testbed", extra_builds.is_testbed, log)
