"""Benchmarks: one module each, with `run(quick) -> dict` of named figures."""
