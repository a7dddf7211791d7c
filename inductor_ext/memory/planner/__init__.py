"""The memory planner: from lifetimes and sizes to offsets in one arena.

Pure: it imports neither torch nor Inductor, and knows of buffers only when they are live and how
large they are. `problem` states the problem, its lower bound and the verifier that every plan
passes; `solver` finds a plan by the placements of `placing`, and `search` improves it;
`csv_problem` reads and writes problems as files. `symbolic` makes offsets that hold for every size,
and `arenas` divides requests among arenas. `schedule` decides which storages of a program go into
arenas at all, `order` in which order its steps run, and `peak` says what is held at the peak. The
adapters to Inductor are `inductor_ext.memory_planning` and `inductor_ext.memory.reorder_kernels`.

Wrong input raises an error of `inductor_ext.exc`; a plan that is returned has been verified.
"""
