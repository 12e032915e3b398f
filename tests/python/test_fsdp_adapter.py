"""The adapter itself: enabling, disabling, fallbacks, errors, the report."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import fsdp_models as fm
import pytest
import tide
import torch
import torch.distributed as dist
from spawn import Context, RankGroup
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

Ranks = Callable[[int], RankGroup]


def _failure(action: Callable[[], object]) -> tide.Error:
    """Returns the tide.Error that ``action`` raises."""
    with pytest.raises(tide.Error) as caught:
        action()
    return caught.value


def switching(context: Context) -> None:
    """Enabled after stock steps, disabled in the middle, enabled again."""

    def drive(run: fm.Run) -> None:
        optimizer = fm.adamw(run.model)
        run.steps(optimizer, 0, 2)
        for first in (2, 6):
            run.enable(strict=True)
            run.steps(optimizer, first, first + 2)
            run.disable()
            run.steps(optimizer, first + 2, first + 4)

    for reshard in (None, False):
        fm.parity(context, fm.Setup(reshard=reshard), drive)


def test_enable_late_and_disable_in_the_middle(ranks: Ranks) -> None:
    ranks(2).run(switching)


def between(context: Context) -> None:
    """Switched between forward and backward: tensors that landed stay valid."""

    def drive(run: fm.Run) -> None:
        optimizer = fm.adamw(run.model)
        for step in range(4):
            if step == 1:
                run.enable(strict=True)
            loss = run.model(fm.batch(context, step)).float().pow(2).mean()
            if step == 0:
                run.enable(strict=True)
            run.disable() if step in (1, 3) else None
            if step == 2:
                run.enable()
            loss.backward()
            if step == 0:
                run.disable()
            run.note("loss", loss)
            optimizer.step()
            optimizer.zero_grad()

    for reshard in (None, False):
        fm.parity(context, fm.Setup(reshard=reshard), drive)


def test_switch_between_forward_and_backward(ranks: Ranks) -> None:
    ranks(2).run(between)


def restored(context: Context) -> None:
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as group_module
    from tide.fsdp import storage

    names = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")

    def functions() -> list[object]:
        return [getattr(group_module, n) for n in names] + [
            collectives.foreach_reduce_scatter_copy_in
        ]

    before, landings = functions(), storage.landing_count()
    models = [fm.Setup().build() for _ in range(2)]
    handles = [tide.enable(model) for model in models]
    assert not set(before) & set(functions())
    for model in models:
        model(fm.batch(context, 0)).sum().backward()
    assert storage.landing_count() > landings
    handles[0].disable()
    assert not set(before) & set(functions())
    tide.disable(models[1])
    handles[1].disable()  # a second time does nothing
    assert functions() == before
    assert storage.landing_count() == landings
    assert _failure(lambda: tide.disable(models[1])).code == "invalid_argument"


def test_disable_restores_everything(ranks: Ranks) -> None:
    ranks(2).run(restored)


def survivors(context: Context) -> None:
    """An unsharded parameter outlives disable, and the model."""
    model = fm.Setup().build()
    handle = tide.enable(model, strict=True)
    model(fm.batch(context, 0))
    model[0].unshard()
    weight = model[0].up.weight.data
    expected = weight.clone()
    handle.disable()
    del handle, model
    again = fm.Setup().build()
    with tide.enable(again, strict=True):
        again(fm.batch(context, 1)).sum().backward()
        assert torch.equal(weight, expected)


def test_landed_tensors_stay_valid(ranks: Ranks) -> None:
    ranks(2).run(survivors)


def two_models(context: Context) -> None:
    def drive(run: fm.Run) -> None:
        other = fm.Run(context, fm.Setup(blocks=2, reshard=False).build(), run.use_tide)
        run.enable(strict=True)
        other.enable(strict=True)
        optimizers = fm.adamw(run.model), fm.adamw(other.model)
        for step in range(3):
            run.steps(optimizers[0], step, step + 1)
            other.steps(optimizers[1], step, step + 1)
        other.disable()
        run.log.extend(other.log)

    fm.parity(context, fm.Setup(), drive)


def test_two_models_at_once(ranks: Ranks) -> None:
    ranks(2).run(two_models)


def mismatched_models(context: Context) -> None:
    extra = context.rank == 1
    messages = []
    for edit in (lambda m: setattr(m[0], "spare", nn.Linear(3 + extra, 2)), None):
        model = fm.Setup(blocks=2, edit=edit).build()
        mode = "in_place" if edit is None and extra else "auto"
        error = _failure(lambda m=model, mode=mode: tide.enable(m, mode=mode))
        assert error.code == "mismatch"
        messages.append(str(error))
    assert "groups[1].params" in messages[0] and "rank 1" in messages[0]
    assert "mode" in messages[1]
    gathered: list[list[str]] = [[] for _ in range(context.world)]
    dist.all_gather_object(gathered, messages)
    assert all(other == messages for other in gathered)


def test_ranks_that_differ_fail_alike(ranks: Ranks) -> None:
    ranks(2).run(mismatched_models)


def one_rank_fails(context: Context) -> None:
    model = fm.Setup(blocks=1).build()
    mode = "nonsense" if context.rank == 1 else "auto"
    error = _failure(lambda: tide.enable(model, mode=mode))
    assert error.code == "invalid_argument" and "rank 1" in str(error) and "nonsense" in str(error)
    nonsense = (
        ("timeout", "5"),
        ("timeout", True),
        ("timeout", 1e10),
        ("nodes", 2**31),
        ("nodes", torch.tensor(2)),
        ("mode", {1}),
    )
    for name, bad in nonsense:
        options = {name: bad} if context.rank == 1 else {}
        error = _failure(lambda options=options: tide.enable(model, **options))
        assert error.code == "invalid_argument" and f"rank 1: {name} must be" in str(error)
    with tide.enable(model):
        again = _failure(lambda: tide.enable(model))
        assert again.code == "invalid_argument" and "already" in str(again)
    assert _failure(lambda: tide.enable(nn.Linear(2, 2))).code == "invalid_argument"


def test_failure_on_one_rank_reaches_all(ranks: Ranks) -> None:
    ranks(2).run(one_rank_fails)


def different_gradients(context: Context) -> None:
    torch.manual_seed(0)
    model = fm.Setup(blocks=1).build()
    tide.enable(model, strict=True)
    loss = model(fm.batch(context, 0)).sum()
    if context.rank == 1:
        model[0].up.bias.requires_grad_(False)
        model[0].up._parameters["bias"].requires_grad_(False)
    error = _failure(loss.backward)
    assert error.code == "mismatch"
    text = str(error)
    assert "0.up.bias" in text and "rank" in text, text


def test_different_participants_name_the_parameter(ranks: Ranks) -> None:
    group = RankGroup(2)  # its communicator cannot be used again
    try:
        group.run(different_gradients)
    finally:
        group.stop()


def fallbacks(context: Context) -> None:
    def reasons(model: nn.Module) -> str:
        error = _failure(lambda: tide.enable(model, strict=True))
        assert error.code == "unsupported" and "(root)" in str(error)
        with tide.enable(model) as handle:
            model(torch.randn(2, 4)).float().sum().backward()
            groups = handle.report().groups
            assert groups[0]["all_gather"] == "stock" or groups[0]["reduce_scatter"] == "stock"
            assert str(handle.report())
            return groups[0]["reason"]

    def shard(**options: object) -> nn.Module:
        torch.manual_seed(0)
        return fully_shard(nn.Linear(4, 4), **{"mesh": fm.mesh(), **options})

    assert "CPU offload" in reasons(shard(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    assert "torch.float16" in reasons(shard(mp_policy=half))
    wide = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    assert "reduction in torch.float64" in reasons(shard(mp_policy=wide))
    custom = shard()
    custom.set_custom_all_gather(_CustomAllGather())
    assert "custom all-gather _CustomAllGather" in reasons(custom)
    double = fully_shard(nn.Linear(4, 4).double(), mesh=fm.mesh())
    assert _failure(lambda: tide.enable(double, strict=True)).code == "unsupported"
    narrowed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    double = fully_shard(nn.Linear(4, 4).double(), mesh=fm.mesh(), mp_policy=narrowed)
    stored = "weight is stored as float64; expected one of bfloat16, float16, float32"
    assert f"all_gather: {stored}" in reasons(double)


def late_groups(context: Context) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    fully_shard(model[0], mesh=fm.mesh())
    note = "on torch's path, since fully_shard came after tide.enable: 1, 2 (tide.disable"
    with tide.enable(model, strict=True) as handle:
        assert note not in str(handle.report())
        for module in (model[1], model[2], model):
            fully_shard(module, mesh=fm.mesh())
        model(torch.randn(2, 4)).sum().backward()
        assert note in str(handle.report())
        assert [group["name"] for group in handle.report().groups] == ["0"]
    assert "fully_shard came after" not in str(handle.report())


def test_groups_made_after_enabling_are_named(ranks: Ranks) -> None:
    ranks(2).run(late_groups)


def _custom_all_gather() -> type:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    return type("_CustomAllGather", (DefaultAllGather,), {})


_CustomAllGather = _custom_all_gather()


def test_fallbacks_name_their_reason(ranks: Ranks) -> None:
    ranks(2).run(fallbacks)


def meshes(context: Context) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    for shape, reason in (((2, 2), "2-D mesh"), ((4, 1), "2-D mesh")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        handle = tide.enable(model)
        model(torch.randn(2, 4)).sum().backward()
        assert reason in handle.report().groups[0]["reason"]
        handle.disable()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    model = fully_shard(nn.Linear(4, 4), mesh=pairs)
    with tide.enable(model, strict=True) as handle:  # one communicator for each pair
        model(torch.randn(2, 4)).sum().backward()
        assert handle.counters["reduce_scatter"]["tide"] == 1


def test_meshes(ranks: Ranks) -> None:
    ranks(4).run(meshes)


def destroyed_groups(context: Context) -> None:
    """Communicators of destroyed process groups are closed when the next one is made."""
    from tide.fsdp.communicators import open_cores

    counts = []
    for _ in range(4):  # the first two may leave one communicator behind, until the third
        process_group = dist.new_group()
        mesh = DeviceMesh.from_group(process_group, "cpu")
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with tide.enable(model, strict=True):
            model(torch.randn(2, 4)).sum().backward()
        counts.append((len(open_cores()), len(os.listdir("/proc/self/task"))))
        del model, mesh
        dist.destroy_process_group(process_group)
        del process_group
        gc.collect()
    assert counts[3] == counts[2] == counts[1], counts


def test_destroyed_process_groups_leave_nothing(ranks: Ranks) -> None:
    ranks(2).run(destroyed_groups)


def one_collective(context: Context) -> None:
    for chosen, other in (("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")):

        def drive(run: fm.Run, chosen: str = chosen) -> None:
            run.enable(strict=True, collectives=[chosen])
            run.steps(fm.adamw(run.model), 0, 2)

        counters = fm.parity(context, fm.Setup(), drive).counters
        assert counters[chosen]["tide"] > 0 and counters[chosen]["stock"] == 0
        assert counters[other]["tide"] == 0
        assert set(counters[other]["reasons"]) == {"not requested"}


def test_one_collective_only(ranks: Ranks) -> None:
    ranks(2).run(one_collective)


def unknown(context: Context) -> None:
    from tide.fsdp import contract

    kept = contract.ALL_GATHER_RESULT_FIELDS
    contract.ALL_GATHER_RESULT_FIELDS = kept[:-1]
    try:
        model = fm.Setup(blocks=1).build()
        assert _failure(lambda: tide.enable(model, strict=True)).code == "unsupported"
        with tide.enable(model) as handle:
            model(fm.batch(context, 0)).sum().backward()
            groups = handle.report().groups
        assert all("not known to TIDE" in group["reason"] for group in groups)
    finally:
        contract.ALL_GATHER_RESULT_FIELDS = kept


def test_unknown_torch_stays_on_its_path(ranks: Ranks) -> None:
    ranks(2).run(unknown)


def before_lazy_init(context: Context) -> None:
    """An unshard before the first forward, and a dtype change after enable."""
    model = fm.Setup(policy=fm.POLICIES["fp32"]).build()
    with tide.enable(model) as handle:
        model.to(torch.bfloat16)
        model[0].unshard()
        assert model[0].up.weight.dtype == torch.bfloat16
        model[0].reshard()
        reasons = handle.counters["all_gather"]["reasons"]
        assert len(reasons) == 1 and "changed its dtype" in next(iter(reasons))


def test_dtype_changed_after_enable(ranks: Ranks) -> None:
    ranks(2).run(before_lazy_init)


def version_counters(context: Context) -> None:
    model = fm.Setup(blocks=1).build()
    with tide.enable(model, strict=True):
        model(fm.batch(context, 0)).sum().backward()
        weight = model[0].up
        model[0].unshard()
        parameter, version = weight.weight, weight.weight._version
        model[0].reshard()
        with pytest.raises(RuntimeError):
            parameter[0, 0].item()  # a stale use raises, as with torch's path
        model[0].unshard()
        assert weight.weight is parameter and parameter._version == version
        model[0].reshard()


def test_parameter_object_and_version_stay(ranks: Ranks) -> None:
    ranks(2).run(version_counters)


def report(context: Context, nodes: int) -> None:
    model = fm.Setup(blocks=2).build()
    with tide.enable(model, mode="slot_reuse", timeout=20.0, nodes=nodes) as handle:
        model(fm.batch(context, 0)).sum().backward()
        shown = handle.report()
    assert [group["name"] for group in shown.groups] == ["(root)", "0", "1"]
    assert all(group["all_gather"] == "tide" for group in shown.groups)
    assert "2 ranks" in str(shown) and "  calls on TIDE  " in str(shown).splitlines()[1]
    assert "\ncalls on TIDE: of all calls so far, all-gathers then reduce-scatters\n" in str(shown)
    outbox = "the outbox between nodes is partial; " if nodes > 1 else ""
    assert f"\nmode slot_reuse: {outbox}gradients are read where autograd" in str(shown)
    memory = shown.as_dict()["memory"]
    assert memory["landing"] > 0
    assert (memory["staging"] > 0) == (nodes == 1) and (memory["inbox"] > 0) == (nodes > 1)
    region = "staging" if nodes == 1 else "outbox"
    assert f"\ntemporary regions a rank: {region} " in str(shown)


@pytest.mark.parametrize("nodes", [1, 2])
def test_report(ranks: Ranks, nodes: int) -> None:
    ranks(2).run(report, nodes)
