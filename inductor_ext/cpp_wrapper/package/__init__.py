"""The .pt2 file: its ZIP format, manifest and C headers."""
