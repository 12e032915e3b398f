"""Random sequences of what a training program may do, on TIDE and on torch's path."""

from __future__ import annotations

import random
from collections.abc import Callable

import fsdp_models as fm
import pytest
import torch
from spawn import Context, RankGroup

Ranks = Callable[[int], RankGroup]
_DELAY_CYCLES = 4_000_000  # of the GPU at most; some milliseconds, as long as several steps


class _Program:
    """Draws the same actions on every rank and in both runs, from one seed."""

    def __init__(self, run: fm.Run, seed: int, mode: str) -> None:
        self.run, self.random, self.mode = run, random.Random(seed), mode
        self.delays = random.Random(1000 * seed + run.context.rank)
        self.blocks = list(run.model)[:-1]
        self.shards = [[p.to_local().data for p in b.parameters()] for b in self.blocks]
        self.optimizer = fm.adamw(run.model)
        self.step = 0

    def train(self) -> None:
        self.run.steps(self.optimizer, self.step, self.step + 1)
        self.step += 1

    def accumulate(self) -> None:
        self.run.model.set_requires_gradient_sync(False)
        self.run.backward(self.step)
        self.run.model.set_requires_gradient_sync(True)
        self.train()

    def forwards(self) -> None:
        outputs = [self.run.model(fm.batch(self.run.context, self.step + i)) for i in range(2)]
        (outputs[0].float().sum() + outputs[1].float().pow(2).sum()).backward()
        self.train()

    def rewrite(self) -> None:
        """Shards change between forward and backward, unseen by version counters."""
        loss = self.run.model(fm.batch(self.run.context, self.step)).float().pow(2).mean()
        for shard in self.random.choice(self.shards):
            shard.mul_(1.01)
        fm.settle_shards()
        loss.backward()
        self.optimizer.zero_grad()
        self.train()

    def delay(self) -> None:
        """The GPU of this rank has other work first."""
        if fm.DEVICE == "cuda":
            torch.cuda._sleep(self.delays.randrange(_DELAY_CYCLES))

    def evaluate(self) -> None:
        with torch.no_grad():
            self.run.note("output", self.run.model(fm.batch(self.run.context, self.step)))

    def unshard(self) -> None:
        block = self.random.choice(self.blocks)
        block.unshard()
        self.run.note("weight", block.up.weight)

    def reshard(self) -> None:
        self.random.choice(self.blocks).reshard()

    def flip(self) -> None:
        block = self.random.choice(self.blocks)
        block.set_reshard_after_forward(self.random.random() < 0.5)

    def prefetch(self) -> None:
        chosen = self.random.sample(self.blocks, 3)
        if fm.DEVICE == "cuda":  # what is prefetched against the order races in torch's own path
            chosen.sort(key=self.blocks.index)
            chosen[2].set_modules_to_backward_prefetch(chosen[1::-1])
        else:
            chosen[1].set_modules_to_backward_prefetch([chosen[0], chosen[2]])
        chosen[0].set_modules_to_forward_prefetch(chosen[1:])

    def switch(self) -> None:
        if self.run.handle is None:
            self.run.enable(mode=self.mode)
        else:
            self.run.disable()
            self.run.handle = None

    def go(self, actions: int) -> None:
        choices = [self.train, self.accumulate, self.forwards, self.evaluate, self.unshard]
        choices += [self.unshard, self.reshard, self.flip, self.prefetch, self.switch]
        choices += [self.rewrite]
        for _ in range(actions):
            self.delay()
            self.random.choice(choices)()
        self.train()


def sequence(context: Context, seed: int) -> None:
    mode = "in_place" if fm.DEVICE == "cpu" or seed % 2 == 0 else "slot_reuse"

    def drive(run: fm.Run) -> None:
        run.enable(mode=mode)
        _Program(run, seed, mode).go(25)

    print(f"seed {seed}")
    fm.parity(context, fm.Setup(blocks=4), drive)


@pytest.mark.parametrize("seed", range(2))
def test_random_sequence(ranks: Ranks, seed: int) -> None:
    ranks(2).run(sequence, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_sequences(ranks: Ranks, seed: int) -> None:
    ranks(2).run(sequence, seed)
