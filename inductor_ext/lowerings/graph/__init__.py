"""FX graphs: matmuls and the operations around them that one kernel can compute."""
