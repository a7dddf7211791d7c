"""The call signature of a model: inputs, outputs, guards on sizes."""
