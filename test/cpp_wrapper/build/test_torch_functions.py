"""The functions of torch that compiled models call, and their declarations in torch's headers."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from inductor_ext import _compat
from inductor_ext.cpp_wrapper.build import torch_functions

INCLUDE = _compat.torch_folder() / "include"
SOURCE = """
#include <cstdio>
#include <string>
extern "C" int aoti_torch_delete_tensor_object(void*);
extern "C" int aoti_torch_device_type_cpu();
extern "C" __attribute__((weak)) int aoti_torch_dtype_int8();
extern "C" int f(void* p) {
  std::puts(std::string(3, 'x').c_str());
  if (aoti_torch_dtype_int8) aoti_torch_dtype_int8();
  return aoti_torch_delete_tensor_object(p) + aoti_torch_device_type_cpu();
}
"""


def build(folder: pathlib.Path, source: str) -> str:
    path = folder / "library.cpp"
    path.write_text(source)
    library = str(folder / "library.so")
    subprocess.run(["g++", "-shared", "-fPIC", str(path), "-o", library], check=True)
    return library


def test_the_functions_of_a_library(tmp_path: pathlib.Path) -> None:
    found = torch_functions.find(build(tmp_path, SOURCE), ["g++"])
    # Neither those of the system nor weak ones.
    assert found == {
        "aoti_torch_delete_tensor_object": (
            "AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor)"
        ),
        "aoti_torch_device_type_cpu": "int32_t aoti_torch_device_type_cpu()",
    }
    assert torch_functions.find_differences(found, INCLUDE) == ([], [])


def test_functions_of_the_c_plus_plus_interface_have_no_declaration(
    tmp_path: pathlib.Path,
) -> None:
    source = "namespace at { int get_num_threads(); }\n"
    source += 'extern "C" int f() { return at::get_num_threads(); }\n'
    found = torch_functions.find(build(tmp_path, source), ["g++"])
    assert found == {"_ZN2at15get_num_threadsEv": ""}
    missing, other = torch_functions.find_differences(found, INCLUDE)
    assert missing + other == ["_ZN2at15get_num_threadsEv"]


def test_symbols_that_cannot_be_listed_are_unknown(tmp_path: pathlib.Path) -> None:
    assert torch_functions.find(str(tmp_path / "none.so"), ["g++"]) is None
    assert torch_functions.find(build(tmp_path, SOURCE), ["no_such_compiler"]) is None
    assert torch_functions.find(build(tmp_path, SOURCE), ["false"]) is None


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    (folder / "sleef.h").write_text(text)
    return folder


HEADER = """
/* int commented_1(int x); */
// int commented_2(int x);
#define DIRECTIVE int directive(int x); \\
  int continued(int x);
#ifdef __cplusplus
extern "C" {
#endif
typedef struct Opaque* Handle;
AOTI_EXPORT int one(
    Handle self, // the tensor
    const int64_t* sizes,
    double x);
SLEEF_IMPORT SLEEF_CONST __m256 two(__m256);
void three(void);
inline int defined(int x) { return called(x); }
#ifdef USE_A
int four(int x);
#else
int four(long x);
#endif
}
extern "C" void five(int x);
"""


def test_declarations_of_a_header(tmp_path: pathlib.Path) -> None:
    names = {"one", "two", "three", "four", "five", "six", "directive", "continued", "called"}
    names |= {"commented_1", "commented_2"}
    assert torch_functions.read_declarations(write(tmp_path, HEADER), names) == {
        "one": "int one(Handle self, const int64_t* sizes, double x)",
        "two": "__m256 two(__m256)",
        "three": "void three(void)",
        "four": "",
        "five": "void five(int x)",
    }


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("int f(int a, int b)", "int f(int a, int b)", True),
        ("int f(int a, int b)", "int f(int x, int b)", True),
        ("int f(int a, int b)", "int f(int, int)", True),
        ("int f(Tensor * a)", "int f(Tensor* a)", True),
        ("int f(int a, int b)", "int f(int b, int a)", False),
        ("int f(int a, int b)", "int f(int b, int c)", False),
        ("int f(int a)", "int f(int a, int b)", False),
        ("int f(int a)", "int f(long a)", False),
        ("int f(const int* a)", "int f(int* a)", False),
        ("int f(int a)", "long f(int a)", False),
        ("int f()", "int f()", True),
        ("int f()", "int f(int a)", False),
    ],
)
def test_what_counts_as_a_difference(
    tmp_path: pathlib.Path, before: str, after: str, same: bool
) -> None:
    include = write(tmp_path, f"{after};")
    assert torch_functions.find_differences({"f": before}, include) == ([], [] if same else ["f"])
    missing = torch_functions.find_differences({"f": before, "g": "int g()"}, include)[0]
    assert missing == ["g"]


def test_most_of_the_c_interface_is_read() -> None:
    names = {"aoti_torch_empty_strided", "aoti_torch_get_data_ptr", "aoti_torch_dtype_bfloat16"}
    names |= {"aoti_torch_cpu_addmm_out", "aoti_torch_cuda_addmm_out", "Sleef_expf8_u10"}
    declared = torch_functions.read_declarations(INCLUDE, names)
    assert declared.keys() == names
    assert all(declared.values())


def test_reading_headers_does_not_import_torch() -> None:
    code = (
        "import sys; from inductor_ext import _compat\n"
        "from inductor_ext.cpp_wrapper.build import torch_functions\n"
        "torch_functions.find_differences({'f': 'int f()'}, _compat.torch_folder() / 'include')\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
