"""halfstep beside its peers on a CPU: every row of the table in docs/benchmarks.md, measured by one command.

`python -m benchmarks.suite` measures, `--write` keeps the numbers in benchmarks/results/cpu-KIND.json and makes docs/benchmarks.md from them.
"""
