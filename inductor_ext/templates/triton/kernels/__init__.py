"""The Triton kernels of the templates.

Each module holds one kernel: its `SOURCE`, a Jinja template for Inductor's `TritonTemplate`, and
`constants`, which returns the template's constants for a problem and a configuration. Both are
plain data: only `inductor_template` imports Inductor.

Everything that is the same for all tiles is decided when the template is rendered. Kernels take
sizes and strides of their operands from Inductor, which turns static ones into constants.
"""
