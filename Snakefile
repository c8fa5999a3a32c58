from snakemake.utils import min_version

min_version("9.0")


include: "rules/common.smk"
include: "rules/source.smk"
include: "rules/tokenize.smk"
include: "rules/calibrate.smk"
include: "rules/permute.smk"
include: "rules/convert.smk"
include: "rules/validate.smk"
include: "rules/tables.smk"
include: "rules/benchmark.smk"


rule all:
    default_target: True
    input:
        rules.convert.input,
        rules.tables.input,
