"""Operators whose kernels write into buffers of ours instead of allocating their outputs.

Stock calls operators that it has no code for (sort, topk, cumulative and linear-algebra functions,
backward passes of poolings, ...) in their functional form. What that allocates the memory planner
can count, but place nowhere. Many of these operators have an out variant that is the kernel itself,
and the functional form only allocates before it. The lowerings here let stock lower such an
operator, and turn what it made into a call of the out variant with outputs that the wrapper
allocates, of the same sizes, strides and element types. They can then lie in an arena or take over
the memory of others. Whatever is not understood stays as stock made it: C++ and FX wrappers, which
cannot call these functions; sizes known only at run time; graphs cut into partitions.

`OUT_VARIANTS` holds the operators for which, on CPU in torch 2.11 and 2.13, the allocator's events
of the out variant, with its outputs added, peak no higher than those of the functional form, for
several sizes, strides and element types. Not among them are:

- Out variants generated from the functional form (torch.Tag.generated): they call it, which
  allocates, and copy. A convolution of [8, 16, 32, 32] with [32, 16, 3, 3] takes 2,097,152 bytes,
  and 3,145,728 through convolution.out.
- Attention: _scaled_dot_product_flash_attention_for_cpu has no out variant at all.
- Out variants by hand that compute elsewhere and copy; bytes of the functional form and of out:
  _fft_r2c (33,280, 66,560), cholesky_solve (20,501, 24,597), linalg_pinv (66,576, 82,960),
  soft_margin_loss_backward (921,600, 1,228,800).
- linalg_qr: its kernel asks whether Q and R share a storage, which in an arena they do, and takes
  that for sharing memory.
- Operators that stock has code for on CPU (digamma, igamma, special functions).
- Outputs whose size depends on the values (nonzero), and random ones (multinomial).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir, lowering, scheduler
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.virtualized import V

from inductor_ext.lowerings import register_lowering

__all__ = ["DEVICES", "OUT_VARIANTS", "SCRATCHLESS", "out_variant"]

DEVICES = frozenset({"cpu"})
"""Device types on which the out variants were measured."""

SCRATCHLESS: dict[str, str] = {
    "_addmm_activation.default": "out",
    "adaptive_max_pool2d_backward.default": "grad_input",
    "adaptive_max_pool3d.default": "out",
    "adaptive_max_pool3d_backward.default": "grad_input",
    "addbmm.default": "out",
    "cummax.default": "out",
    "cummin.default": "out",
    "fractional_max_pool2d_backward.default": "grad_input",
    "fractional_max_pool3d_backward.default": "grad_input",
    "logcumsumexp.default": "out",
    "max_pool3d_with_indices_backward.default": "grad_input",
    "replication_pad1d_backward.default": "grad_input",
    "replication_pad2d_backward.default": "grad_input",
    "topk.default": "values",
    "upsample_linear1d_backward.default": "grad_input",
    "upsample_trilinear3d_backward.default": "grad_input",
}
"""Operator -> its out variant's overload, where the kernel was seen to allocate nothing."""

OUT_VARIANTS: dict[str, str] = {
    **SCRATCHLESS,
    "_linalg_det.default": "result",
    "_linalg_eigh.default": "eigenvalues",
    "_linalg_slogdet.default": "sign",
    "_linalg_solve_ex.default": "result",
    "_linalg_svd.default": "U",
    "cholesky_inverse.default": "out",
    "cumprod.default": "out",
    "cumsum.default": "out",
    "gcd.default": "out",
    "geqrf.default": "a",
    "index_reduce.default": "out",
    "kthvalue.default": "values",
    "linalg_cholesky_ex.default": "L",
    "linalg_householder_product.default": "out",
    "linalg_inv_ex.default": "inverse",
    "linalg_ldl_factor_ex.default": "out",
    "linalg_ldl_solve.default": "out",
    "linalg_lu.default": "out",
    "linalg_lu_factor_ex.default": "out",
    "linalg_lu_solve.default": "out",
    "linalg_solve_triangular.default": "out",
    "lu_unpack.default": "out",
    "median.dim": "dim_values",
    "mode.default": "values",
    "nanmedian.dim": "dim_values",
    "ormqr.default": "out",
    "sort.stable": "values_stable",
    "triangular_solve.default": "X",
    "upsample_bicubic2d_backward.default": "grad_input",
}
"""Operator of ATen -> its out variant's overload; names as in `str(operator)` without "aten."."""

_ALSO = ("sort.default",)
"""Operators that stock lowers to one of the above."""


def out_variant(operator: Any) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The out variant of an operator, and the names of its out arguments in the outputs' order.

    Args:
        operator: an OpOverload or anything else.

    Returns:
        None where there is none that is worth it, or its signature is not the one expected.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return None
    name = str(operator).removeprefix("aten.")
    found = getattr(operator.overloadpacket, OUT_VARIANTS.get(name, ""), None)
    if found is None or torch.Tag.generated in found.tags:
        return None
    arguments = found._schema.arguments
    outs = tuple(argument.name for argument in arguments if argument.is_out)
    own = [argument.name for argument in arguments if not argument.is_out]
    expected = [argument.name for argument in operator._schema.arguments]
    if own != expected or len(outs) != len(operator._schema.returns):
        return None
    return found, outs


# --- the intermediate representation ------------------------------------------------------------


class OutVariantKernel(ir.FallbackKernel):
    """A call of an out variant. `outputs` are the buffers that it fills."""

    variant: tuple[torch._ops.OpOverload, tuple[str, ...]]
    """As from `out_variant`."""

    def codegen(self, wrapper: Any) -> None:
        """Allocate the outputs and write the call."""
        unused = []
        for output in self.outputs:
            name = output.get_name()
            if name in V.graph.removed_buffers:
                # Nobody reads it, but the kernel writes it.
                V.graph.removed_buffers.discard(name)
                unused.append(output)
            wrapper.codegen_allocation(output)
        self.write_call(wrapper)
        for output in unused:
            wrapper.codegen_free(output)
        # There is no tuple to hold, hence no variable of that name to delete.
        wrapper.freed.add(self.get_name())

    def write_call(self, wrapper: Any) -> None:
        """Write the call of the operator, whose outputs are allocated."""
        self.codegen_comment(wrapper)
        line = _OutVariantLine(self)
        if str(self.op_overload).removeprefix("aten.") in SCRATCHLESS:
            wrapper.writeline(line)
        else:
            # The memory planner takes the text of an operator's call for a kernel that may need
            # more memory than is known.
            wrapper.writeline(line.text())


class DirectOutVariantKernel(OutVariantKernel):
    """The same where the kernel itself is the buffer that it fills.

    From torch 2.14 on, a fallback with one tensor as its result has no other node for it.
    """

    def should_allocate(self) -> bool:
        """The wrapper allocates it, before the kernel's call."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Write the call."""
        name = self.get_name()
        unused = name in V.graph.removed_buffers
        if unused:
            # Nobody reads it, but the kernel writes it.
            V.graph.removed_buffers.discard(name)
            wrapper.codegen_allocation(self)
        self.write_call(wrapper)
        if unused:
            wrapper.codegen_free(self)


class OutVariantOutput(ir.MultiOutput):
    """A buffer that an `OutVariantKernel` fills."""

    def should_allocate(self) -> bool:
        """The wrapper allocates it, before the kernel's call."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Nothing is left to do after the kernel's call."""


@dataclasses.dataclass
class _OutVariantLine(WrapperLine):
    """The call, in a wrapper's lines."""

    node: OutVariantKernel

    def text(self) -> str:
        """Python code."""
        node = self.node
        operator, names = node.variant
        outputs = [node] if isinstance(node, DirectOutVariantKernel) else node.outputs
        outs = [f"{name}={out.get_name()}" for name, out in zip(names, outputs, strict=True)]
        arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs(), *outs])
        return f"torch.ops.{operator}({arguments})"

    def codegen(self, code: Any) -> None:
        """Write it."""
        code.writeline(self.text())


# --- the lowerings ------------------------------------------------------------------------------


def _lower(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = stock(*args, **kwargs)
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    kernel = _kernel_of(first)
    variant = None if kernel is None else _covering(kernel)
    if variant is not None:
        # What stock has noted about the kernel and its outputs (names, users, origins) is right for
        # ours: only the code that is generated differs. So they become ours as they stand.
        direct = isinstance(kernel.layout, ir.FixedLayout)
        kernel.__class__ = DirectOutVariantKernel if direct else OutVariantKernel
        kernel.variant = variant
        for output in kernel.outputs:
            output.__class__ = OutVariantOutput
    return result


def _kernel_of(value: Any) -> Any:
    """The kernel that directly makes a lowering's result; None for one that is no fallback's."""
    box = value.data if isinstance(value, ir.TensorBox) else None
    output = box.data if isinstance(box, ir.StorageBox) else None
    if type(output) is ir.FallbackKernel:
        return output
    if type(output) is not ir.MultiOutput:
        return None
    kernel = output.inputs[0]
    return kernel if type(kernel) is ir.FallbackKernel else None


def _covering(kernel: Any) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The out variant that can be called in a kernel's stead; None if anything is against it."""
    found = out_variant(kernel.op_overload)
    if found is None or V.graph.cpp_wrapper or V.graph.fx_wrapper or _partitioned():
        return None
    # See `DirectOutVariantKernel`.
    outputs = kernel.outputs or [kernel]
    covered = (
        len(outputs) == len(found[1])
        and not kernel.unbacked_bindings
        and not kernel.mutation_outputs
        and all(map(_covers_output, outputs))
    )
    return found if covered else None


def _covers_output(output: Any) -> bool:
    if type(output) not in (ir.MultiOutput, ir.FallbackKernel):
        return False
    if type(output.layout) is not ir.FixedLayout:
        return False
    layout = output.layout
    return (
        layout.device.type in DEVICES
        and layout.offset == 0
        and not layout.is_pinned
        and not layout.dtype.is_complex
        and not layout.get_free_symbol_uses(unbacked_only=True)
    )


def _partitioned() -> bool:
    """Whether the kernel may come to stand in another function than its outputs' users.

    A partition hands the others what stock's kernel returned, which is nothing here.
    """
    custom = getattr(scheduler, "_unstable_customized_partition_wrapper", None)
    return bool(
        inductor_config.graph_partition
        and (
            inductor_config.triton.cudagraphs
            or getattr(inductor_config, "custom_should_partition_ops", None)
            or getattr(custom, "wrapper", None) is not None
        )
    )


def _register() -> None:
    for name in (*OUT_VARIANTS, *_ALSO):
        packet, overload = name.split(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if operator in lowering.lowerings:
            register_lowering(operator)(_lower)


_register()
