"""What a model takes and returns: inputs, outputs, guards on sizes."""
