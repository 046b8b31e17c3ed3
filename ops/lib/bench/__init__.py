"""The benchmarks of `ops/bench`: one file each, and what they share.

`main` knows their names. A benchmark has `HELP`, `add_options(parser)` and `measure(options)`,
which returns a `Report`. `measure` holds the statistics and the report, `workload` what is run and
what comes back, `sides` the two ways to run it; `raw` is the program of one of them.
"""
