"""FSDP2 training of a small MLP on CPU with TIDE: torchrun --nproc-per-node 4 train_mlp.py."""

import tide
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, BLOCKS, STEPS = 256, 4, 50


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model on every rank
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    handle = tide.enable(model)  # the one added line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator)
        loss = (model(x).float() - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(handle.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
