"""Lowerings for operators whose out variants write into buffers that the wrapper allocates.

Inductor calls operators without a lowering (sort, topk, cumulative and linear-algebra functions,
backward passes of poolings, ...) in their functional form. The memory planner can count what that
allocates, but cannot place it. Many of these operators have an out variant that is the actual
kernel, and the functional form only allocates before calling it. The lowerings here let Inductor
lower such an operator, and then turn the result into a call of the out variant. The wrapper
allocates the outputs with the same sizes, strides and dtypes, so they can be placed in an arena or
reuse other memory. Inductor's lowering is kept for everything that is not understood: C++ and FX
wrappers, which cannot call these functions; unbacked sizes; graphs that are partitioned.

`OUT_VARIANTS` lists the operators for which, on CPU in torch 2.11 and 2.13, the allocation peak of
the out variant plus its outputs is not above that of the functional form, for several sizes,
strides and dtypes. Not included are:

- Out variants generated from the functional form (torch.Tag.generated): they call it, which
  allocates, and copy. A convolution of [8, 16, 32, 32] with [32, 16, 3, 3] takes 2,097,152 bytes,
  and 3,145,728 through convolution.out.
- Attention: _scaled_dot_product_flash_attention_for_cpu has no out variant at all.
- Hand-written out variants that compute elsewhere and copy; bytes of the functional form and of
  out: _fft_r2c (33,280, 66,560), cholesky_solve (20,501, 24,597), linalg_pinv (66,576, 82,960),
  soft_margin_loss_backward (921,600, 1,228,800).
- linalg_qr: its kernel checks whether Q and R share a storage, which they do in an arena, and then
  assumes that they overlap.
- Operators that Inductor has a lowering for on CPU (digamma, igamma, special functions).
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

from inductor_ext.hooks.lowering_table import register_lowering

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
"""Operator -> overload of its out variant, for kernels that were observed to allocate nothing."""

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
"""ATen operator -> overload of its out variant; names as in `str(operator)` without "aten."."""

_ALSO = ("sort.default",)
"""Operators that Inductor lowers to one of the above."""


def find_out_variant(operator: Any) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """Return the out variant of an operator and its out argument names, in the outputs' order.

    Args:
        operator: an OpOverload or any other object.

    Returns:
        None if `OUT_VARIANTS` lists none, or if its signature is not the expected one.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return None
    name = str(operator).removeprefix("aten.")
    variant = getattr(operator.overloadpacket, OUT_VARIANTS.get(name, ""), None)
    if variant is None or torch.Tag.generated in variant.tags:
        return None
    arguments = variant._schema.arguments
    outs = tuple(argument.name for argument in arguments if argument.is_out)
    names = [argument.name for argument in arguments if not argument.is_out]
    expected = [argument.name for argument in operator._schema.arguments]
    if names != expected or len(outs) != len(operator._schema.returns):
        return None
    return variant, outs


class OutVariantKernel(ir.FallbackKernel):
    """A call of an out variant. `outputs` are the buffers that it fills."""

    variant: tuple[torch._ops.OpOverload, tuple[str, ...]]
    """As returned by `find_out_variant`."""

    @property
    def may_allocate(self) -> bool:
        """Whether the kernel may need a workspace of unknown size."""
        return str(self.op_overload).removeprefix("aten.") not in SCRATCHLESS

    def codegen(self, wrapper: Any) -> None:
        """Allocate the outputs and write the call."""
        unused = []
        for output in self.outputs:
            name = output.get_name()
            if name in V.graph.removed_buffers:
                # Nothing reads it, but the kernel writes it.
                V.graph.removed_buffers.discard(name)
                unused.append(output)
            wrapper.codegen_allocation(output)
        self.write_call(wrapper)
        for output in unused:
            wrapper.codegen_free(output)
        # There is no tuple of outputs, hence no variable of that name to delete.
        wrapper.freed.add(self.get_name())

    def write_call(self, wrapper: Any) -> None:
        """Write the call of the operator; its outputs are already allocated."""
        self.codegen_comment(wrapper)
        operator, names = self.variant
        outputs = [self] if isinstance(self, DirectOutVariantKernel) else self.outputs
        outs = [f"{name}={out.get_name()}" for name, out in zip(names, outputs, strict=True)]
        arguments = ", ".join([*self.codegen_args(), *self.codegen_kwargs(), *outs])
        wrapper.writeline(OutVariantLine(self, f"torch.ops.{operator}({arguments})"))


class DirectOutVariantKernel(OutVariantKernel):
    """An out variant call whose kernel node is itself the buffer that it fills.

    From torch 2.14, a fallback that returns one tensor has no separate output node.
    """

    def should_allocate(self) -> bool:
        """Whether the wrapper allocates it, before the kernel's call: always."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Write the call."""
        name = self.get_name()
        unused = name in V.graph.removed_buffers
        if unused:
            # Nothing reads it, but the kernel writes it.
            V.graph.removed_buffers.discard(name)
            wrapper.codegen_allocation(self)
        self.write_call(wrapper)
        if unused:
            wrapper.codegen_free(self)


class OutVariantOutput(ir.MultiOutput):
    """A buffer that an `OutVariantKernel` fills."""

    def should_allocate(self) -> bool:
        """Whether the wrapper allocates it, before the kernel's call: always."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Do nothing: the kernel's call has filled the buffer."""


@dataclasses.dataclass
class OutVariantLine(WrapperLine):
    """The call, as a line of a wrapper."""

    node: OutVariantKernel
    text: str

    def codegen(self, code: Any) -> None:
        """Write the line."""
        code.writeline(self.text)


def _lower(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = stock(*args, **kwargs)
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    kernel = _kernel_of(first)
    variant = None if kernel is None else _find_usable_variant(kernel)
    if variant is not None:
        # What Inductor has recorded about the kernel and its outputs (names, users, origins) stays
        # valid, since only the generated code differs. So change their classes in place.
        direct = isinstance(kernel.layout, ir.FixedLayout)
        kernel.__class__ = DirectOutVariantKernel if direct else OutVariantKernel
        kernel.variant = variant
        for output in kernel.outputs:
            output.__class__ = OutVariantOutput
    return result


def _kernel_of(value: Any) -> Any:
    """Return the fallback kernel that produces a lowering's result; None if there is none."""
    box = value.data if isinstance(value, ir.TensorBox) else None
    output = box.data if isinstance(box, ir.StorageBox) else None
    if type(output) is ir.FallbackKernel:
        return output
    if type(output) is not ir.MultiOutput:
        return None
    kernel = output.inputs[0]
    return kernel if type(kernel) is ir.FallbackKernel else None


def _find_usable_variant(kernel: Any) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """Return the out variant to call instead of a kernel; None if it cannot be used."""
    variant = find_out_variant(kernel.op_overload)
    if variant is None or V.graph.cpp_wrapper or V.graph.fx_wrapper or _may_be_partitioned():
        return None
    # See `DirectOutVariantKernel`.
    outputs = kernel.outputs or [kernel]
    covered = (
        len(outputs) == len(variant[1])
        and not kernel.unbacked_bindings
        and not kernel.mutation_outputs
        and all(map(_is_supported_output, outputs))
    )
    return variant if covered else None


def _is_supported_output(output: Any) -> bool:
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


def _may_be_partitioned() -> bool:
    """Whether the kernel and the users of its outputs may be in different functions.

    A partition passes to the others what Inductor's kernel returned, which does not exist here.
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
