"""Programs that show inductor_ext on real input."""
