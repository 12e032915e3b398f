"""The reduce-scatter: gradients are read where autograd left them, so nothing is packed.

FSDP2's own ``foreach_reduce`` runs, with its reduce-scatter replaced for one call. It asks that
object for the packed input, which is a meta tensor without memory; for the output, a real tensor;
and then to run. Division, hooks, views and accumulation stay FSDP2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from tide.fsdp import patches, prefetch
from tide.fsdp.group import CORE_DTYPES, REDUCE_DTYPES, REDUCE_SCATTER, GroupState, find

if TYPE_CHECKING:
    from tide.fsdp.slots import Slot

_REDUCE_NAMES = patches.parameter_names("foreach_reduce")
_COPY_IN_NAMES = patches.parameter_names("foreach_reduce_scatter_copy_in")


class _OpenCall(ReduceScatter):
    """The reduce-scatter of one ``foreach_reduce``."""

    def __init__(self, state: GroupState, indices: list[int], scale: float) -> None:
        self._state, self._indices, self._scale = state, indices, scale
        self.input: torch.Tensor | None = None
        self._grads: list[torch.Tensor] = []
        self._slot: Slot | None = None  # that holds the gradients

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns the input, without memory, at the first call, then the output."""
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device="meta")
            self.input._tide_call = self
            return self.input
        return torch.empty(*size, dtype=dtype, device=device)

    def take(self, grads: Sequence[torch.Tensor]) -> None:
        """Keeps the gradients, each (rows, ...) and contiguous, instead of packing them.

        In mode slot_reuse they move into the landing slot that their parameters have left, on the
        stream that made them, and their own memory is free for the rest of the backward.
        """
        self._grads = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
        self._slot = self._state.slot_for_gradients(self._grads, self._indices)
        if self._slot is None:
            return
        stream = torch.cuda.current_stream()
        if self._slot.vacated is not None:
            stream.wait_event(self._slot.vacated)
        memory = self._slot.bytes()
        moved = []
        for grad, index in zip(self._grads, self._indices, strict=True):
            there = memory.narrow(0, self._state.offsets[index], grad.numel() * grad.itemsize)
            moved.append(there.view(grad.dtype).view(grad.shape))
        self._slot.overwrite()
        torch._foreach_copy_(moved, self._grads)
        self._slot.vacate_after(stream)  # if the call comes to nothing
        self._grads = moved

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces the gradients into ``output_tensor``, 1-D: the padded shards in order."""
        state, grads = self._state, self._grads
        if len(grads) != len(self._indices):
            raise RuntimeError(
                f"group {state.name}: expected {len(self._indices)} gradients before the "
                f"reduce-scatter, but the copy-in gave {len(grads)}"
            )
        dtypes = [CORE_DTYPES[grad.dtype] for grad in grads]
        on_gpu = state.channel.device.type == "cuda"
        state.channel.core.reduce_scatter(
            state.gid,
            self._indices,
            [grad.data_ptr() for grad in grads],
            dtypes,
            output_tensor.data_ptr(),
            CORE_DTYPES[output_tensor.dtype],
            self._scale,
            False,
            stream=torch.cuda.current_stream().cuda_stream if on_gpu else None,
        )
        if self._slot is not None:
            self._slot.vacate_after(torch.cuda.current_stream())
        elif on_gpu:
            # FSDP2 keeps the input until the stream of the gradients has waited for this call.
            input_tensor._tide_gradients = grads
        # On CPUs peers have read them; the memory serves the rest of the backward.
        self._grads = []

    def close(self) -> None:
        """Drops what an exception may have left; breaks the cycle with the input tensor."""
        self._grads = []
        if self.input is not None:
            del self.input._tide_call
            self.input = None


def _scale(call: dict[str, Any], reduce_dtype: torch.dtype, world: int) -> float:
    """Returns the factor of the sums that the collective itself applies."""
    factor = call["gradient_divide_factor"]
    _, _, op, _ = patches.original("_get_gradient_divide_factors")(
        call["reduce_scatter_group"],
        call["all_reduce_group"],
        reduce_dtype,
        call["device"].type,
        factor,
        call.get("force_sum_reduction_for_comms", False),
    )
    if op == dist.ReduceOp.AVG:
        return 1.0 / world
    if op == dist.ReduceOp.SUM:
        return 1.0
    return 1.0 / factor  # PREMUL_SUM


def _call_reason(state: GroupState, call: dict[str, Any], entries: list[Any]) -> str | None:
    """Returns why this call must run on torch's path; rank-invariant."""
    if REDUCE_SCATTER in state.reasons:
        return state.reasons[REDUCE_SCATTER]
    if any(entry is None or entry[0] is not state for entry in entries):
        return "parameters of several groups"
    if type(call["reduce_scatter_comm"]) is not DefaultReduceScatter:
        return f"custom reduce-scatter {type(call['reduce_scatter_comm']).__name__}"
    if call["all_reduce_group"] is not None:
        return "2-D mesh (HSDP)"
    group = call["reduce_scatter_group"]
    if group is None or group.size() != state.world:
        return "another process group"
    if (reason := patches.untraceable()) is not None:
        return reason
    return _dtype_reason(state, call, entries)


def _dtype_reason(state: GroupState, call: dict[str, Any], entries: list[Any]) -> str | None:
    grads = call["unsharded_grads"]
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) != 1:
        return "gradients of several dtypes"  # torch's path raises
    dtype = dtypes.pop()
    if dtype not in CORE_DTYPES:
        return f"gradients in {dtype}"
    reduce_dtype = call["reduce_dtype"] or dtype
    if reduce_dtype not in REDUCE_DTYPES:
        return f"reduction in {reduce_dtype}"
    for grad, (_, index) in zip(grads, entries, strict=True):
        layout = state.layouts[index]
        if type(grad) is not torch.Tensor or grad.numel() != layout.numel:
            return f"gradient of {layout.name} is not a plain tensor of {layout.numel} elements"
    return None


def dispatch_reduce(*args: Any, **kwargs: Any) -> Any:
    """Takes the place of ``foreach_reduce``."""
    stock = patches.original("foreach_reduce")
    call = {**dict(zip(_REDUCE_NAMES, args, strict=False)), **kwargs}
    entries = [find(param) for param in call["fsdp_params"]]
    state = next((entry[0] for entry in entries if entry is not None), None)
    if state is None:
        return stock(*args, **kwargs)
    if (reason := _call_reason(state, call, entries)) is not None:
        state.fall_back(REDUCE_SCATTER, reason)
        return stock(*args, **kwargs)
    reduce_dtype = call["reduce_dtype"] or call["unsharded_grads"][0].dtype
    scale = _scale(call, reduce_dtype, state.world)
    opened = _OpenCall(state, [index for _, index in entries], scale)
    call["reduce_scatter_comm"] = opened
    # Only ``call`` and this list may hold the gradients, and FSDP2 clears the list.
    del args, kwargs
    try:
        results = stock(**call)
    finally:
        opened.close()
    state.counters.tide(REDUCE_SCATTER)
    if state.early_all_gather:
        prefetch.issue_early(state)
    return results


def dispatch_copy_in(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``foreach_reduce_scatter_copy_in``."""
    call = {**dict(zip(_COPY_IN_NAMES, args, strict=False)), **kwargs}
    target = call["reduce_scatter_input"]
    opened = getattr(target, "_tide_call", None)
    if opened is not None and opened.input is target:
        opened.take(call["unsharded_grads"])
        return
    patches.original("foreach_reduce_scatter_copy_in")(*args, **kwargs)
