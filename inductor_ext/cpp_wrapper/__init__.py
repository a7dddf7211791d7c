"""The C++ host program of a compiled model, and the package that it is deployed in."""
