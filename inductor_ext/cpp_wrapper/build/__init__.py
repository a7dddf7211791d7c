"""Generated C++ to a shared library, or to a CMake project."""
