"""`python -m tide.bench`: the standard set of rows, what `make bench` prints."""

from tide.cli import _collective, mlp

for ranks in (2, 4):
    for operation in ("all-gather", "reduce-scatter"):
        _collective(operation, ranks, 1, "small", 20, None)
mlp(ranks=4)
