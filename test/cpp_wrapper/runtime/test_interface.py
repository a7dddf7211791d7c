"""torch's C interface of a compiled model: its functions, and constants that the caller owns."""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch._inductor

from test.support.built_models import Built, elf

OMITTED = {
    # Codegen of the minimal interface writes them into the model; `codegen.supported` refuses it.
    "AOTInductorModelRunMinimalArrayrefInterface": "aot_inductor.use_minimal_arrayref_interface",
    "AOTInductorModelRunMinimalArrayrefInterfaceV2": "aot_inductor.use_minimal_arrayref_interface",
    # From torch 2.14 on; no loader of torch calls them. They are hints for copying weights to a
    # GPU, which the runtime does by one copy of the mapped file.
    "AOTInductorSetUsePinnedAsyncConstantsCopy": "performance only",
    "AOTInductorSetPinnedAsyncConstantsCopyStageBufferBytes": "performance only",
}
"""The functions of torch's interface that an artifact does not have, and why."""


def declared_functions() -> set[str]:
    """The functions that the installed torch declares for an artifact."""
    header = "include/torch/csrc/inductor/aoti_runtime/interface.h"
    text = (pathlib.Path(torch.__file__).parent / header).read_text()
    return set(re.findall(r"AOTIRuntimeError\s+(AOTInductor\w+)\(", text))


class Entry(ctypes.Structure):
    """AOTInductorConstantMapEntry of torch's interface."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


def handles(tensors: Sequence[torch.Tensor]) -> list[int]:
    """AtenTensorHandles of tensors, owned by the caller."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [pointer(capsule, None) for capsule in capsules]


class ExternalConstants:
    """A model that AOTInductorModelContainerCreateWithExternalConstants creates."""

    def __init__(self, library: pathlib.Path, constants: Mapping[str, torch.Tensor]) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.inductor_ext_last_error.restype = ctypes.c_char_p
        self.library.inductor_ext_quiet(1)
        entries = (Entry * len(constants))(
            *(
                Entry(name.encode(), handle)
                for name, handle in zip(constants, handles([*constants.values()]), strict=True)
            )
        )
        self.container = ctypes.c_void_p()
        self.code = self.library.AOTInductorModelContainerCreateWithExternalConstants(
            ctypes.byref(self.container),
            ctypes.c_size_t(1),
            b"cpu",
            None,
            entries,
            ctypes.c_size_t(len(constants)),
        )

    @property
    def error(self) -> str:
        return str(self.library.inductor_ext_last_error().decode())

    def loads_constants(self) -> bool:
        loaded = ctypes.c_bool()
        query = self.library.AOTInductorModelContainerDidCallLoadConstants
        assert query(self.container, ctypes.byref(loaded)) == 0
        return loaded.value

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the model; it has one result."""
        arguments = (ctypes.c_void_p * len(inputs))(*handles(inputs))
        outputs = (ctypes.c_void_p * 1)()
        run = self.library.AOTInductorModelContainerRun
        sizes = [ctypes.c_size_t(size) for size in (len(inputs), 1)]
        assert run(self.container, arguments, sizes[0], outputs, sizes[1], None, None) == 0
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p,) * 3
        (result,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(
            [capsule(outputs[0], None, None)]
        )
        return result

    def delete(self) -> None:
        assert self.library.AOTInductorModelContainerDelete(self.container) == 0


class TestExternalConstants:
    @pytest.mark.parametrize("folding", [False, True])
    def test_the_model_uses_external_tensors(self, folding: bool, tmp_path: pathlib.Path) -> None:
        torch.manual_seed(0)
        linear, x = torch.nn.Linear(16, 12), torch.randn(3, 16)

        class Scaled(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = linear

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.linear(x, self.linear.weight.exp(), self.linear.bias)

        options = {
            "aot_inductor.use_runtime_constant_folding": folding,
            # With the cache disabled, the runtime is compiled too, and no header is precompiled.
            "artifact_cache": folding,
        }
        built = Built(tmp_path, Scaled(), x, **options)
        (model,) = built.loaded.manifest.models.values()
        other = {
            "linear.weight": torch.randn_like(linear.weight),
            "linear.bias": torch.randn_like(linear.bias),
        }
        names = {constant.fqn: constant.name for constant in model.constants}
        external = ExternalConstants(
            built.library, {names[fqn]: tensor for fqn, tensor in other.items()}
        )
        assert (external.code, external.error) == (0, "")
        assert not external.loads_constants()
        expected = torch.nn.functional.linear(x, other["linear.weight"].exp(), other["linear.bias"])
        torch.testing.assert_close(external(x), expected)
        # Not copied: the model sees what the caller writes to a tensor, except folded values.
        other["linear.bias"].zero_()
        expected = torch.nn.functional.linear(x, other["linear.weight"].exp())
        torch.testing.assert_close(external(x), expected)
        external.delete()
        # Other containers have their own constants.
        torch.testing.assert_close(built.loaded(x), built.model(x))

    def test_all_constants_are_required(self, tied: Built) -> None:
        external = ExternalConstants(tied.library, {})
        assert external.code != 0
        assert "is not among the constants that the model was created with" in external.error

    def test_a_model_reports_its_own_weights(self, tied: Built) -> None:
        loaded, container = ctypes.c_bool(), ctypes.c_void_p(tied.loaded._instance.container)
        library = tied.loaded._instance.library._library
        query = library.AOTInductorModelContainerDidCallLoadConstants
        assert query(container, ctypes.byref(loaded)) == 0
        assert loaded.value


class TestSharedObject:
    def test_only_the_c_interface_is_visible(self, tied: Built) -> None:
        lines = elf("nm", "-D", "--defined-only", str(tied.library)).splitlines()
        names = {line.split()[-1] for line in lines}
        assert all(name.startswith(("AOTInductor", "inductor_ext_")) for name in names)
        assert {"AOTInductorModelContainerRun", "inductor_ext_last_error"} <= names

    def test_it_has_every_function_that_torch_declares(self, tied: Built) -> None:
        """torch's loader warns about missing functions at each load."""
        lines = elf("nm", "-D", "--defined-only", str(tied.library)).splitlines()
        missing = declared_functions() - {line.split()[-1] for line in lines}
        assert missing == declared_functions() & OMITTED.keys()

    def test_missing_cpu_features_are_reported(self, tied: Built) -> None:
        library = ctypes.CDLL(str(tied.library))
        library.inductor_ext_missing_cpu_features.restype = ctypes.c_char_p
        assert library.inductor_ext_missing_cpu_features() == b""
