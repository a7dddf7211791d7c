"""The C++ code of a compiled model, and the .pt2 package that contains it."""
