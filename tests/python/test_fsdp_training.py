"""Training loops other than the plain one give what they give on torch's own path."""

from __future__ import annotations

from collections.abc import Callable

import fsdp_models as fm
import pytest
import torch
from spawn import Context, RankGroup
from torch import nn

Ranks = Callable[[int], RankGroup]


def accumulation(context: Context, sync: bool) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        for step in range(3):
            for part in range(3):
                run.model.set_requires_gradient_sync(sync or part == 2)
                run.backward(10 * step + part, 1 / 3)
            run.note(f"step {step} grad", fm.snapshot(run.model, "grad"))
            optimizer.step()
            optimizer.zero_grad()

    fm.parity(context, fm.Setup(), drive)


@pytest.mark.parametrize("sync", [True, False])
def test_gradient_accumulation(ranks: Ranks, sync: bool) -> None:
    ranks(2).run(accumulation, sync)


def unsharded_accumulation(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        for step in range(2):
            for part in range(3):
                last = part == 2
                run.model.set_requires_gradient_sync(last)
                run.model.set_reshard_after_backward(last)
                run.model.set_is_last_backward(last)
                run.backward(10 * step + part, 1 / 3)
            optimizer.step()
            optimizer.zero_grad()

    fm.parity(context, fm.Setup(reshard=False), drive)


def test_accumulation_with_kept_parameters(ranks: Ranks) -> None:
    ranks(2).run(unsharded_accumulation)


def divide_factors(context: Context) -> None:
    def drive(factor: float | None) -> fm.Drive:
        def run_steps(run: fm.Run) -> None:
            for module in run.model.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
            fm.train(run)

        return run_steps

    for factor in (None, 3.0, float(context.world)):
        fm.parity(context, fm.Setup(), drive(factor))


def test_force_sum_and_divide_factor(ranks: Ranks) -> None:
    ranks(2).run(divide_factors)


def factor_alone(context: Context) -> None:
    """torch's path cannot do this on gloo, so the gradients are computed by hand."""
    gradients = []
    for factor in (None, 8.0):
        model = fm.Setup(policy=fm.POLICIES["fp32"]).build()
        run = fm.Run(context, model, use_tide=True)
        if factor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
        run.enable(strict=True)
        run.backward(0)
        gradients.append(fm.snapshot(model, "grad"))
        run.disable()
    for name, averaged in gradients[0].items():
        assert torch.equal(averaged * context.world / 8.0, gradients[1][name]), name


def test_divide_factor_alone(ranks: Ranks) -> None:
    ranks(2).run(factor_alone)


def clipping(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        for step in range(3):
            run.backward(step)
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            run.note(f"step {step} norm", norm.full_tensor())
            optimizer.step()
            optimizer.zero_grad()

    fm.parity(context, fm.Setup(), drive)


def test_clip_grad_norm(ranks: Ranks) -> None:
    ranks(2).run(clipping)


def checkpoint(context: Context, assign: bool) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        run.steps(optimizer, 0, 2)
        saved = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        run.steps(optimizer, 2, 4)
        run.model.load_state_dict(saved, assign=assign)
        run.steps(fm.adamw(run.model), 4, 6)

    fm.parity(context, fm.Setup(edit=lambda m: setattr(m[0], "odd", fm.Odd())), drive)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(ranks: Ranks, assign: bool) -> None:
    ranks(2).run(checkpoint, assign)


def prefetch(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        blocks = list(run.model)[:-1]
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])
        fm.train(run)

    fm.parity(context, fm.Setup(blocks=5), drive)


def test_prefetch_lists_of_two(ranks: Ranks) -> None:
    ranks(2).run(prefetch)


def two_forwards(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        for step in range(3):
            first = run.model(fm.batch(context, 2 * step)).float().pow(2).mean()
            second = run.model(fm.batch(context, 2 * step + 1)).float().pow(2).mean()
            (first + second).backward()
            run.note("loss", first + second)
            optimizer.step()
            optimizer.zero_grad()

    fm.parity(context, fm.Setup(), drive)
    fm.parity(context, fm.Setup(reshard=False), drive)


def test_two_forwards_before_a_backward(ranks: Ranks) -> None:
    ranks(2).run(two_forwards)


class _Skipping(nn.Sequential):
    skip: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, module in enumerate(self):
            if i not in self.skip:
                x = module(x)
        return x


def skipping(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        # The class may not be chosen earlier: fully_shard has made a subclass of Sequential.
        forward = _Skipping.forward
        run.model.forward = forward.__get__(run.model)
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        for step, skip in enumerate([(), (1,), (0, 2), (3,), ()]):
            run.model.skip = frozenset(skip)
            run.steps(optimizer, step, step + 1)

    fm.parity(context, fm.Setup(blocks=4), drive)


def test_skipped_layers(ranks: Ranks) -> None:
    ranks(2).run(skipping)


def unshard_all(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        for step in range(3):
            for block in list(run.model)[:-1]:
                block.unshard()
            run.note("weight", run.model[1].up.weight)
            run.steps(optimizer, step, step + 1)
        for block in list(run.model)[:-1]:
            block.unshard()
            block.reshard()

    fm.parity(context, fm.Setup(blocks=5), drive)


def test_unshard_of_every_block(ranks: Ranks) -> None:
    ranks(2).run(unshard_all)


def asynchronous(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable()
        optimizer = fm.adamw(run.model)
        run.steps(optimizer, 0, 1)
        handles = [block.unshard(async_op=True) for block in list(run.model)[:-1]]
        for handle in handles:
            handle.wait()
        run.steps(optimizer, 1, 3)

    handle = fm.parity(context, fm.Setup(), drive)
    assert handle.counters["all_gather"]["reasons"] == {"asynchronous unshard": 3}


def test_asynchronous_unshard(ranks: Ranks) -> None:
    ranks(2).run(asynchronous)


def reshard_flips(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizer = fm.adamw(run.model)
        run.steps(optimizer, 0, 2)
        run.model.set_reshard_after_forward(False)
        run.steps(optimizer, 2, 4)
        run.model.set_reshard_after_forward(True)
        run.steps(optimizer, 4, 6)
        run.model.eval()
        with torch.no_grad():
            run.note("eval", run.model(fm.batch(context, 9)))
        with torch.inference_mode():
            run.note("inference", run.model(fm.batch(context, 9)))
        run.steps(optimizer, 6, 7)

    fm.parity(context, fm.Setup(blocks=4), drive)


def test_reshard_after_forward_changed_in_the_middle(ranks: Ranks) -> None:
    ranks(2).run(reshard_flips)


def post_forward_mesh(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable()
        run.steps(fm.adamw(run.model), 0, 3)

    handle = fm.parity(context, fm.Setup(reshard=2), drive)
    assert handle.counters["all_gather"]["reasons"] == {"post-forward mesh": 9}


def test_post_forward_mesh(ranks: Ranks) -> None:
    ranks(4).run(post_forward_mesh)


def recompute(context: Context) -> None:
    from torch.utils.checkpoint import checkpoint as remat

    def wrap(model: nn.Sequential) -> None:
        for block in list(model)[:-1]:
            forward = block.forward
            block.forward = lambda x, f=forward: remat(f, x, use_reentrant=False)

    fm.parity(context, fm.Setup(edit=wrap))


def test_activation_checkpointing(ranks: Ranks) -> None:
    ranks(2).run(recompute)


def optimizer_in_backward(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        run.enable(strict=True)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in run.model.parameters()}

        def hook(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            run.backward(step)

    fm.parity(context, fm.Setup(), drive)


def test_optimizer_in_backward(ranks: Ranks) -> None:
    ranks(2).run(optimizer_in_backward)
