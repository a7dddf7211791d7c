"""The C++ of a package: Inductor's wrapper code generation, extended."""
