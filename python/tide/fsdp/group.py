"""Per-group state: what TIDE knows about one FSDPParamGroup, and whether it may serve it."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from tide import _core
from tide.fsdp.errors import make_error
from tide.fsdp.slots import SlotState
from tide.fsdp.storage import LandingSet

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from tide.fsdp.communicators import Channel
    from tide.fsdp.kept_landings import Landed
    from tide.fsdp.slots import Slot, SlotPool

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER)

CORE_DTYPES: dict[torch.dtype, int] = {
    torch.bfloat16: _core.BF16,
    torch.float16: _core.F16,
    torch.float32: _core.F32,
}
_ITEM_BYTES = {core: dtype.itemsize for dtype, core in CORE_DTYPES.items()}
REDUCE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class ParamLayout:
    """One parameter as a matrix of ``rows`` x ``row_elems`` that is sharded by rows.

    A parameter sharded on a dimension above 0 is described by the re-chunked gradient that FSDP2
    hands to the reduce-scatter: (world * shape[0]) rows.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int
    rows: int
    row_elems: int
    dtype: torch.dtype  # of the unsharded parameter
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter, without padding."""
        return self.rows * self.row_elems

    def signature(self) -> dict[str, Any]:
        """Returns what ranks must agree on."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "shard_dim": self.shard_dim,
            "dtype": str(self.dtype),
            "trainable": self.trainable,
        }


def unsharded_dtype(param: FSDPParam) -> torch.dtype:
    """Returns the all-gather's dtype, also before FSDP2's lazy initialization."""
    wanted, shard = param.mp_policy.param_dtype, param.sharded_param.dtype
    return wanted if wanted is not None and shard.is_floating_point else shard


def describe_param(param: FSDPParam, name: str, world: int) -> ParamLayout:
    """Returns the layout of ``param`` over ``world`` ranks."""
    shape = tuple(param._orig_size)
    dim = param.fsdp_placement.dim
    numel = math.prod(shape)
    rows = shape[0] * (1 if dim == 0 else world)
    if numel == 0:
        rows, row_elems = 0, 1
    else:
        row_elems = numel // rows
    trainable = param.sharded_param.requires_grad
    return ParamLayout(name, shape, dim, rows, row_elems, unsharded_dtype(param), trainable)


def _both_reasons(group: FSDPParamGroup, layouts: list[ParamLayout]) -> str | None:
    """Returns why neither collective of the group can be served, or None."""
    mesh_info = group.mesh_info
    if type(mesh_info) is not FSDPMeshInfo:
        return f"2-D mesh or replication ({type(mesh_info).__name__})"
    if getattr(mesh_info, "is_spmd_mesh", False):  # as of torch 2.13
        return "parameters on an SPMD mesh"
    if mesh_info.shard_mesh_size == 1:
        return "world size 1"
    if group.device.type == "cuda":
        if missing := _core.nccl()["reason"]:
            return f"no collectives on GPUs: {missing}"
    elif group.device.type != "cpu":
        return f"parameters on {group.device.type}"
    for param, layout in zip(group.fsdp_params, layouts, strict=True):
        if param.offload_to_cpu:
            return "CPU offload"
        if param.is_dtensor:
            return f"DTensor parameter {layout.name}"
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            return f"tensor extension on {layout.name}"
    return None


def _unsupported(name: str, how: str, dtype: torch.dtype) -> str:
    served = ", ".join(str(served).removeprefix("torch.") for served in CORE_DTYPES)
    return f"{name} {how} {str(dtype).removeprefix('torch.')}; expected one of {served}"


def _all_gather_reason(group: FSDPParamGroup, layouts: list[ParamLayout]) -> str | None:
    if type(group._all_gather_comm) is not DefaultAllGather:
        return f"custom all-gather {type(group._all_gather_comm).__name__}"
    for param, layout in zip(group.fsdp_params, layouts, strict=True):
        if layout.shard_dim != 0:
            return f"{layout.name} is sharded on dimension {layout.shard_dim}"
        if layout.dtype not in CORE_DTYPES:
            return _unsupported(layout.name, "is gathered in", layout.dtype)
        if param.sharded_param.dtype not in CORE_DTYPES:
            return _unsupported(layout.name, "is stored as", param.sharded_param.dtype)
    return None


def _reduce_scatter_reason(group: FSDPParamGroup, layouts: list[ParamLayout]) -> str | None:
    if type(group._reduce_scatter_comm) is not DefaultReduceScatter:
        return f"custom reduce-scatter {type(group._reduce_scatter_comm).__name__}"
    for layout in layouts:
        if layout.trainable and layout.dtype not in CORE_DTYPES:
            return _unsupported(layout.name, "has gradients of", layout.dtype)
    wanted = group.mp_policy.reduce_dtype
    dtypes = {wanted} if wanted is not None else {x.dtype for x in layouts if x.trainable}
    for dtype in dtypes:
        if dtype not in REDUCE_DTYPES:
            return f"reduction in {dtype}"
    return None


def static_reasons(
    group: FSDPParamGroup, layouts: list[ParamLayout], collectives: tuple[str, ...]
) -> dict[str, str]:
    """Returns, for each collective that must stay on torch's path, the reason.

    Rank-invariant: it looks only at what ranks are checked to have in common.
    """
    reasons: dict[str, str] = {}
    both = _both_reasons(group, layouts)
    for name, check in ((ALL_GATHER, _all_gather_reason), (REDUCE_SCATTER, _reduce_scatter_reason)):
        reason = both or check(group, layouts)
        if name not in collectives:
            reason = "not requested"
        if reason is not None:
            reasons[name] = reason
    return reasons


@dataclass
class CallCounters:
    """Calls by collective and path, and the reasons of those that ran on torch's path."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    refreshed: int = 0  # all-gathers on TIDE of what lay there already; see kept_landings.py

    def tide(self, collective: str) -> None:
        """Counts a call that ran on TIDE."""
        self.calls[collective, "tide"] += 1

    def stock(self, collective: str, reason: str) -> None:
        """Counts a call that ran on torch's path."""
        self.calls[collective, "stock"] += 1
        self.reasons[collective, reason] += 1

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Returns {collective: {"tide": calls, "stock": calls, "reasons": {reason: calls}}}."""
        table: dict[str, dict[str, Any]] = {}
        for collective in COLLECTIVES:
            reasons = {r: n for (c, r), n in self.reasons.items() if c == collective}
            table[collective] = {
                "tide": self.calls[collective, "tide"],
                "stock": self.calls[collective, "stock"],
                "reasons": reasons,
            }
        return table


class GroupState:
    """One enabled FSDPParamGroup."""

    def __init__(self, group: FSDPParamGroup, name: str, layouts: list[ParamLayout]) -> None:
        self.group_ref = weakref.ref(group)
        self.name = name
        self.layouts = layouts
        self.world: int = getattr(group.mesh_info, "shard_mesh_size", 1)
        self.reasons: dict[str, str] = {}
        self.strict = False
        self.counters = CallCounters()
        self.channel: Channel | None = None
        self.pool: SlotPool | None = None
        self.gid = -1
        self.landing_bytes = 0
        self.offsets: list[int] = []  # bytes, of each parameter in a landing
        self.gather_dtypes = [CORE_DTYPES.get(layout.dtype, -1) for layout in layouts]
        self.outputs: list[torch.Tensor] = []
        self.landings: LandingSet | None = None
        self.slot: Slot | None = None  # where the outputs lie
        self.vacated: tuple[Slot, int] | None = None  # where they lay, and that slot's turn then
        self.landed: Landed | None = None  # the last all-gather; see kept_landings.py
        self.keeps_landings = False
        self.reuse_slots = False  # mode slot_reuse on a GPU
        self.early_all_gather = False  # mode in_place on a GPU; see prefetch.py
        self.place: int | None = None  # of the backward under way, in the order of the forward
        self.in_place: Counter[str] = Counter()  # calls that could not reuse their slot, by reason

    def path(self, collective: str) -> str:
        """Returns "tide" or "stock"."""
        return "stock" if collective in self.reasons else "tide"

    def register(self, channel: Channel, pool: SlotPool) -> None:
        """Tells the communicator about the group; the same order on all ranks."""
        self.channel, self.pool = channel, pool
        params = [
            (p.name, p.rows, p.row_elems, dtype if dtype >= 0 else _core.U8)
            for p, dtype in zip(self.layouts, self.gather_dtypes, strict=True)
        ]
        self.gid = channel.core.register_group(self.name, params)
        self.landing_bytes = channel.core.landing_bytes(self.gid)
        self.offsets = channel.core.landing_offsets(self.gid)

    def need(self) -> tuple[int, list[int], list[int], int]:
        """Returns the group id, what it reduces, and the gradients' and the output's dtypes."""
        if self.path(REDUCE_SCATTER) != "tide":
            return self.gid, [], [], _core.F32
        trainable = [i for i, layout in enumerate(self.layouts) if layout.trainable]
        grads = [self.gather_dtypes[i] for i in trainable]
        group = self.group_ref()
        reduced = group.mp_policy.reduce_dtype if group is not None else None
        output = CORE_DTYPES[reduced] if reduced is not None else max(grads, default=_core.F32)
        return self.gid, trainable, grads, output

    def packed_gradient_bytes(self) -> int:
        """Returns the bytes of the copy of all gradients that torch's reduce-scatter packs."""
        _, trainable, _, output = self.need()
        return sum(self._unsharded_elems(self.layouts[i]) for i in trainable) * _ITEM_BYTES[output]

    def _unsharded_elems(self, layout: ParamLayout) -> int:
        """Returns the elements of a parameter with its padding, as FSDP2 gathers it."""
        return -(-layout.rows // self.world) * self.world * layout.row_elems

    def attach(self, group: FSDPParamGroup) -> str | None:
        """Puts landing allocators under the group's unsharded storages, making them if missing.

        Returns the reason if a storage that FSDP2 made earlier does not fit, else None.
        """
        if self.landings is not None:
            kept = zip(group.fsdp_params, self.outputs, strict=True)
            if all(
                len(p.all_gather_outputs) == 1 and p.all_gather_outputs[0] is t for p, t in kept
            ):
                return None
            self.detach()
        tensors = []
        for param, layout in zip(group.fsdp_params, self.layouts, strict=True):
            numel = self._unsharded_elems(layout)
            if not param.all_gather_outputs:
                tensor = torch.empty(numel, dtype=layout.dtype, device=param.device)
                tensor.untyped_storage().resize_(0)
                param.all_gather_outputs = [tensor]
            tensor = param.all_gather_outputs[0]
            fits = tensor.numel() == numel and tensor.dtype == layout.dtype
            if len(param.all_gather_outputs) != 1 or not fits or tensor.storage_offset() != 0:
                return f"the unsharded storage of {layout.name} has another size or dtype"
            tensors.append(tensor)
        try:
            self.landings = LandingSet(tensors, self.offsets)
        except ValueError as error:
            return str(error)
        self.outputs = tensors
        return None

    def slot_for_gradients(self, grads: list[torch.Tensor], indices: list[int]) -> Slot | None:
        """Returns the slot that the group has just left, if the gradients fit there.

        In mode slot_reuse; otherwise, and with the reason counted, None.
        """
        if not self.reuse_slots:
            return None
        slot, turn = self.vacated or (None, 0)
        reason = None
        if slot is None or slot.state is not SlotState.FREE or slot.turn != turn:
            reason = "the group's landing slot was not vacated"
        elif any(g.dtype != self.layouts[i].dtype for g, i in zip(grads, indices, strict=True)):
            reason = "gradients in another dtype than the all-gather's"
        if reason is not None:
            self.in_place[reason] += 1
            return None
        return slot

    def detach(self) -> None:
        """Gives the unsharded storages back their own allocators."""
        if self.landings is not None:
            self.landings.detach()
        self.landings, self.outputs, self.landed = None, [], None

    def fall_back(self, collective: str, reason: str) -> None:
        """Counts a call on torch's path.

        Raises:
            tide.Error: "unsupported" with strict.
        """
        self.counters.stock(collective, reason)
        if self.strict and reason != "not requested":
            raise make_error(
                "unsupported",
                f"group {self.name}: {collective} cannot run on TIDE ({reason}); "
                "pass strict=False to let such calls run on torch's path",
                group=self.name,
                operation=collective,
            )


# Which group state, and at which index, a parameter belongs to. Weak: TIDE keeps no model alive.
_registry: weakref.WeakKeyDictionary[FSDPParam, tuple[GroupState, int]]
_registry = weakref.WeakKeyDictionary()


def find(param: FSDPParam) -> tuple[GroupState, int] | None:
    """Returns the state of the parameter's group and the parameter's index in it."""
    return _registry.get(param)


def state_of(group: FSDPParamGroup) -> GroupState | None:
    """Returns the state of an FSDP2 group, or None if it is not enabled."""
    entry = find(group.fsdp_params[0]) if group.fsdp_params else None
    return entry[0] if entry is not None else None


def register_params(state: GroupState, params: list[FSDPParam]) -> None:
    """Makes ``find`` know the group's parameters."""
    for i, param in enumerate(params):
        _registry[param] = (state, i)


def forget_params(params: list[FSDPParam]) -> None:
    """Undoes ``register_params``."""
    for param in params:
        _registry.pop(param, None)
