"""C++ code generation for compiled models, on top of Inductor's C++ wrapper codegen."""
