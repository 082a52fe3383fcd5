"""Benchmarks, one file a question."""
