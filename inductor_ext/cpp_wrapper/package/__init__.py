"""The .pt2 package: its zip format, manifest and C headers."""
