"""The C++ client of AOT packages: a header and CMake files for programs without Python.

`include/inductor_ext.hpp` loads packages with the same checks as `inductor_ext.load`, and raises
errors of the same kinds. `cmake/` lets CMake find it. No settings; does not import torch.
"""

from __future__ import annotations

import os


def cmake_prefix_path() -> str:
    """Return the folder for CMAKE_PREFIX_PATH with which `find_package(inductor_ext)` succeeds.

    Together with `torch.utils.cmake_prefix_path`, since the client uses libtorch. The target is
    `inductor_ext::client`.
    """
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "cmake")
