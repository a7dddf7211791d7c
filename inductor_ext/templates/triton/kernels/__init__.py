"""The Triton kernels of the templates.

A module a kernel, each with its `SOURCE`, in the template language of Inductor's `TritonTemplate`,
and `constants`, which says what a problem and a configuration make of it. Both are plain data:
`instances` alone knows Inductor.

Kernels are written so that everything that is the same for all tiles is decided when they are
rendered, and take the sizes and strides of their operands from Inductor, which makes constants of
what is static.
"""
