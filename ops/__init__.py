"""What an operator runs: demo, tests, benchmarks, the demo model."""
