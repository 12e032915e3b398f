"""Random sequences of what a training program may do, on TIDE and on torch's path."""

from __future__ import annotations

import random
from collections.abc import Callable

import fsdp_models as fm
import pytest
import torch
from spawn import Context, RankGroup

Ranks = Callable[[int], RankGroup]


class _Program:
    """Draws the same actions on every rank and in both runs, from one seed."""

    def __init__(self, run: fm.Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.blocks = list(run.model)[:-1]
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
        chosen[0].set_modules_to_forward_prefetch(chosen[1:])
        chosen[1].set_modules_to_backward_prefetch([chosen[0], chosen[2]])

    def switch(self) -> None:
        if self.run.handle is None:
            self.run.enable()
        else:
            self.run.disable()
            self.run.handle = None

    def go(self, actions: int) -> None:
        choices = [self.train, self.accumulate, self.forwards, self.evaluate, self.unshard]
        choices += [self.unshard, self.reshard, self.flip, self.prefetch, self.switch]
        for _ in range(actions):
            self.random.choice(choices)()
        self.train()


def sequence(context: Context, seed: int) -> None:
    def drive(run: fm.Run) -> None:
        run.enable()
        _Program(run, seed).go(25)

    print(f"seed {seed}")
    fm.parity(context, fm.Setup(blocks=4), drive)


@pytest.mark.parametrize("seed", range(2))
def test_random_sequence(ranks: Ranks, seed: int) -> None:
    ranks(2).run(sequence, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_sequences(ranks: Ranks, seed: int) -> None:
    ranks(2).run(sequence, seed)
