"""Benchmarks: python -m benchmarks.bench_<op>. Results are committed in results/."""
