"""Much of everything at once: what it costs in memory, and that nobody starves.

Bounds are several times what was measured (ops/BENCHMARKS.md); `pytest -s` prints the numbers.
"""
