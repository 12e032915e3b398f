"""Puts TIDE's dispatchers in the place of seven functions of torch's FSDP2, and takes them out.

Patched once while at least one model is enabled. Each dispatcher passes calls that do not belong
to an enabled group to the original function, arguments untouched.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param as param_module
import torch.distributed.fsdp._fully_shard._fsdp_param_group as group_module

from tide.fsdp import contract

_PATCHED = (
    (group_module, "foreach_all_gather"),
    (group_module, "foreach_all_gather_copy_out"),
    (group_module, "foreach_reduce"),
    (collectives, "foreach_reduce_scatter_copy_in"),
    (group_module.FSDPParamGroup, "_to_sharded"),
    (group_module.FSDPParamGroup, "_to_sharded_post_forward"),
    (group_module.FSDPParamGroup, "_backward_prefetch"),
)

_users = 0
_originals: dict[str, Callable[..., Any]] = {}
_installed: dict[str, Callable[..., Any]] = {}


def _deviation() -> str | None:
    """Says where the installed torch differs from the contract, or None."""
    for name, expected in contract.PARAMETERS.items():
        function = _originals.get(name) or getattr(collectives, name, None)
        if function is None:
            return f"{name} is missing"
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            return f"{name} takes {found}, expected {expected}"
    reduce = _originals.get("foreach_reduce") or collectives.foreach_reduce
    results = len(typing.get_args(inspect.signature(reduce).return_annotation))
    if results not in contract.FOREACH_REDUCE_RESULTS:
        return f"foreach_reduce returns {results} items, not {contract.FOREACH_REDUCE_RESULTS}"
    if collectives.AllGatherResult._fields != contract.ALL_GATHER_RESULT_FIELDS:
        return f"AllGatherResult has fields {collectives.AllGatherResult._fields}"
    for owner, names in (
        (param_module.FSDPParam, contract.PARAM_METHODS),
        (group_module.FSDPParamGroup, contract.GROUP_ATTRIBUTES),
    ):
        for name in names:
            if not hasattr(owner, name):
                return f"{owner.__name__}.{name} is missing"
    return None


def unknown_torch() -> str | None:
    """Returns why TIDE does not know the installed FSDP2, or None if the contract fits."""
    deviation = _deviation()
    if deviation is None:
        return None
    return (
        f"FSDP2 of this torch ({torch.__version__}) is not known to TIDE, which knows that of "
        f"torch {contract.VERSIONS}: {deviation}"
    )


def parameter_names(name: str) -> tuple[str, ...]:
    """Returns the parameter names of a patched function, in order."""
    return contract.PARAMETERS[name]


def untraceable() -> str | None:
    """Returns why a call that is under way can't be TIDE's, whatever it is, or None."""
    if torch.compiler.is_compiling():
        return "compiling"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "CUDA graph capture"
    return None


def original(name: str) -> Callable[..., Any]:
    """Returns torch's own function."""
    return _originals.get(name) or getattr(collectives, name)


def install() -> None:
    """Patches on the first use; ``remove`` undoes it on the last."""
    global _users
    _users += 1
    if _users > 1:
        return
    from tide.fsdp import all_gather, prefetch, reduce_scatter

    dispatchers = {
        "foreach_all_gather": all_gather.dispatch_issue,
        "foreach_all_gather_copy_out": all_gather.dispatch_copy_out,
        "foreach_reduce": reduce_scatter.dispatch_reduce,
        "foreach_reduce_scatter_copy_in": reduce_scatter.dispatch_copy_in,
        "_to_sharded": all_gather.dispatch_to_sharded,
        "_to_sharded_post_forward": all_gather.dispatch_to_sharded_post_forward,
        "_backward_prefetch": prefetch.dispatch_backward_prefetch,
    }
    for module, name in _PATCHED:
        _originals.setdefault(name, getattr(module, name))
        _installed[name] = dispatchers[name]
        setattr(module, name, dispatchers[name])


def remove() -> None:
    """Restores torch's functions when the last user goes, unless someone patched over TIDE."""
    global _users
    _users -= 1
    if _users > 0:
        return
    for module, name in _PATCHED:
        if getattr(module, name) is _installed[name]:
            setattr(module, name, _originals[name])
            del _originals[name]
