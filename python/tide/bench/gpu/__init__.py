"""Benchmarks on GPUs: TIDE beside NCCL, beside stock FSDP2's path and beside the copy engines.

Needs neither typer nor rich: `python -m tide.bench.gpu --help`.
"""
