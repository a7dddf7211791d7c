"""Memory of generated code: wrapper-line analysis, memory planning, arenas and kernel order."""
