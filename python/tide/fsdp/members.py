"""The FSDPParamGroups inside a model, and what TIDE makes of each before it is enabled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from tide.fsdp import contract
from tide.fsdp.group import GroupState, describe_param

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


@dataclass
class Member:
    """One FSDPParamGroup inside the model, before it is enabled."""

    group: FSDPParamGroup
    state: GroupState
    kept: bool  # stays unsharded between forward and backward

    @property
    def device(self) -> torch.device:
        """Where the group's parameters lie."""
        return self.group.device

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that the group is sharded over, or None if there is nothing to share."""
        info = self.group.mesh_info
        if not isinstance(info, FSDPMeshInfo) or info.shard_mesh_size == 1:
            return None
        return info.shard_process_group


def _states(model: nn.Module) -> list[tuple[FSDPState, str, bool]]:
    """Returns (state, module name, is outermost) in the order of ``named_modules``."""
    found: dict[FSDPState, tuple[str, bool]] = {}
    outer: list[str] = []
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is None or state in found:
            continue
        outermost = not any(prefix == "" or name.startswith(f"{prefix}.") for prefix in outer)
        if outermost:
            outer.append(name)
        found[state] = (name or "(root)", outermost)
    return [(state, name, outermost) for state, (name, outermost) in found.items()]


def named_groups(model: nn.Module) -> Iterator[tuple[str, FSDPParamGroup, bool]]:
    """Yields (name, group, stays unsharded between forward and backward)."""
    for state, name, outermost in _states(model):
        groups = contract.param_groups(state)
        becomes_kept = outermost and bool(state._auto_reshard_after_forward)
        for i, group in enumerate(groups):
            kept = group.post_forward_mesh_info is None or becomes_kept
            yield (name if len(groups) == 1 else f"{name}#{i}"), group, kept


def collect(model: nn.Module) -> list[Member]:
    """Describes every FSDPParamGroup inside ``model``."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    members = []
    for label, group, kept in named_groups(model):
        world = getattr(group.mesh_info, "shard_mesh_size", 1)
        layouts = []
        for param in group.fsdp_params:
            info = param._module_info
            prefix = prefixes.get(id(info.module), "")
            full = f"{prefix}.{info.param_name}" if prefix else info.param_name
            layouts.append(describe_param(param, full, world))
        members.append(Member(group, GroupState(group, label, layouts), kept))
    return members
