"""Benchmarks that measure TIDE beside stock FSDP2, and the demo."""
