"""Benchmarks and the demo. Every module here can run FSDP2 alone, so it needs TIDE only for TIDE."""
