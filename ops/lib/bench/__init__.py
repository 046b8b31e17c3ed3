"""The benchmarks of `ops/bench`: one file each, and what they share.

`main` knows their names. A benchmark has `HELP`, `add_options(parser)` and `measure(options)`,
which returns a `Report`. `measure` holds the statistics and the report, `options` types of options.
engine: `workload` is what is run and what comes back, `sides` the two ways to run it, `raw` the
program of one of them. control: `load` holds its loads, `plain` the limits of redis-py beside them,
`control_report` its tables.
"""
