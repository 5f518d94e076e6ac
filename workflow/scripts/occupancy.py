"""Occupancy of every entry function, and of the stream kernel at each launch shape that the protocol tries."""

from lab import arms, occupancy
from lab.files import read_json, write_text
from lab.script import logged
from qgemm_mx import build

H200_SM_COUNT = 132

with logged(snakemake.log[0]) as log:
    launches = arms.stream_launches(read_json(snakemake.input.protocol), H200_SM_COUNT)
    records = [build.BuildRecord.from_json(value) for value in read_json(snakemake.input.builds)]
    table = occupancy.table(records, launches)
    write_text(snakemake.output.table, table.to_csv(index=False, lineterminator="\n"))
    log(f"{len(table)} rows")
