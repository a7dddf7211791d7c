"""Build the generated C++ into a shared library, or write a CMake project for it."""
