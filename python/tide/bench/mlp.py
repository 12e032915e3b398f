"""Forward and backward of a small MLP under FSDP2, stock and TIDE alternating in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tide.bench.launch import Context, launch, require_memory
from tide.stats import Interval, comparison, now

_TOKENS = 16
_WARM_UP = 2


@dataclass(frozen=True)
class Config:
    """What every rank is told."""

    blocks: int
    width: int
    rounds: int


def _step(model: Any, batch: Any) -> Interval:
    import torch.distributed as dist

    dist.barrier()
    start = now()
    model(batch).float().pow(2).mean().backward()
    end = now()
    model.zero_grad()
    return start, end


def _worker(context: Context, config: Config) -> dict[str, Any]:
    import torch

    import tide
    from tide.bench.models import Mlp, shard

    torch.manual_seed(0)
    model = shard(Mlp(config.blocks, config.width, 4 * config.width))
    batch = torch.randn(_TOKENS, config.width)
    times: dict[str, list[Interval]] = {"stock": [], "tide": []}
    report: list[dict[str, Any]] = []
    for index in range(config.rounds):
        for name, intervals in times.items():
            handle = tide.enable(model, strict=True) if name == "tide" else None
            steps = [_step(model, batch) for _ in range(_WARM_UP + 1)]
            intervals.append(steps[-1])
            if handle is not None:
                report = handle.report().groups
                tide.disable(model)
        if context.rank == 0:
            context.progress(index)
    return {"times": times, "groups": report}


def run(
    ranks: int,
    blocks: int = 4,
    width: int = 512,
    rounds: int = 10,
    on_progress: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Measures forward + backward of `blocks` x (width, 4*width, width), 16 tokens a rank.

    Returns:
        A row: op, ranks, blocks, width, the numbers of `stats.comparison`, groups on TIDE's path.
    """
    require_memory(
        ranks * (blocks * width * width * 8 * 24 + (300 << 20)), f"the bench on {ranks} ranks"
    )
    results = launch(_worker, ranks, Config(blocks, width, rounds), on_progress)
    return {
        "op": "mlp",
        "ranks": ranks,
        "blocks": blocks,
        "width": width,
        **comparison([result["times"] for result in results]),
        "groups": sum(
            g["all_gather"] == g["reduce_scatter"] == "tide" for g in results[0]["groups"]
        ),
    }
