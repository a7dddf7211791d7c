"""Fixes of Inductor bugs, in effect only in compiles of the extension.

A module per subject declares its hooks, with the upstream issue and the first torch release that no
longer needs the fix, if known. A fix of generated C++ is in `cpp_wrapper/codegen/upstream_fixes`.
docs/user/correctness.md lists all of them for users.
"""

from __future__ import annotations

from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes import (
    any_reductions,
    arg_reductions,
    average_pools,
    concatenations,
    control_flow,
    cpp_wrapper_options,
    cpu_division,
    cpu_dtypes,
    cpu_functions,
    cpu_loads,
    cpu_matmuls,
    cpu_reductions,
    empty_reductions,
    equal_calls,
    exported_programs,
    fallback_calls,
    fallback_strides,
    fallback_views,
    first_calls,
    graph_pattern_checks,
    graph_patterns,
    inplace_views,
    joint_graphs,
    losses,
    mkldnn_inplace,
    mutation,
    operator_views,
    parallel_errors,
    pinned_copies,
    returned_views,
    scatter_atomics,
    selected_values,
    strided_views,
)

_MODULES = (
    exported_programs,
    concatenations,
    control_flow,
    cpu_division,
    cpu_dtypes,
    cpu_functions,
    cpu_loads,
    cpu_matmuls,
    cpu_reductions,
    empty_reductions,
    equal_calls,
    any_reductions,
    arg_reductions,
    average_pools,
    graph_pattern_checks,
    graph_patterns,
    inplace_views,
    joint_graphs,
    losses,
    fallback_calls,
    mkldnn_inplace,
    mutation,
    fallback_strides,
    fallback_views,
    first_calls,
    operator_views,
    parallel_errors,
    pinned_copies,
    returned_views,
    scatter_atomics,
    selected_values,
    strided_views,
)

_CALLED = (cpp_wrapper_options,)
"""Fixes that `hooks.compile_fx` calls, without a dispatcher of their own."""

HOOKS: tuple[Hook, ...] = tuple(hook for module in _MODULES + _CALLED for hook in module.HOOKS)


def install_hooks() -> None:
    """Install the dispatchers of all fixes, once per process."""
    for module in _MODULES:
        module.install_hooks()
