"""What TIDE relies on inside torch.distributed.fsdp for torch 2.11 to 2.14.

Checked against the installed torch before anything is patched; nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

VERSIONS = "2.11 - 2.14"

# Parameter names, in order, of the functions that are patched or called.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "foreach_all_gather": (
        "fsdp_params",
        "group",
        "async_op",
        "all_gather_copy_in_stream",
        "all_gather_stream",
        "device",
        "all_gather_comm",
    ),
    "foreach_all_gather_copy_out": ("all_gather_result", "fsdp_params", "group"),
    "foreach_reduce": (
        "fsdp_params",
        "unsharded_grads",
        "reduce_scatter_group",
        "reduce_scatter_stream",
        "reduce_scatter_comm",
        "orig_dtype",
        "reduce_dtype",
        "device",
        "gradient_divide_factor",
        "all_reduce_group",
        "all_reduce_stream",
        "all_reduce_grads",
        "partial_reduce_output",
        "all_reduce_hook",
        "force_sum_reduction_for_comms",
    ),
    "foreach_reduce_scatter_copy_in": ("unsharded_grads", "reduce_scatter_input", "world_size"),
    "_get_gradient_divide_factors": (
        "reduce_scatter_group",
        "all_reduce_group",
        "reduce_dtype",
        "device_type",
        "factor",
        "force_sum_reduction_for_comms",
    ),
}

# Six up to 2.12; 2.13 adds the stream of the last reduction.
FOREACH_REDUCE_RESULTS = (6, 7)

ALL_GATHER_RESULT_FIELDS: tuple[str, ...] = (
    "all_gather_output",
    "all_gather_event",
    "all_gather_work",
    "param_all_gather_input_dtypes",
    "param_all_gather_input_numels",
    "all_gather_input_split_sizes",
)

# Attributes of FSDPParam's class and of FSDPParamGroup's class that TIDE reads, calls or replaces.
PARAM_METHODS: tuple[str, ...] = ("alloc_all_gather_outputs",)
GROUP_ATTRIBUTES: tuple[str, ...] = (
    "is_unsharded",
    "_to_sharded",
    "_to_sharded_post_forward",
    "_backward_prefetch",
    "_prefetch_unshard",
)


def param_groups(state: Any) -> list[Any]:
    """Returns the FSDPParamGroups of an FSDPState: a list as of 2.12, one or None before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups
