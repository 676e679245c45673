"""Benchmarks: one question each, run as `python -m benchmarks.bench_<question>` from the top of the tree."""
