"""The memory planner: computes arena offsets from live ranges and sizes.

Pure: it imports neither torch nor Inductor. It sees a buffer only as a live range and a size.

- `interval` defines the problem, its lower bound and the verifier that every plan must pass.
- `solver` finds a plan with the placements of `greedy`, and `local_search` improves it.
- `csv_io` reads and writes problems as CSV files.
- `symbolic` computes offsets that hold for every size. `arenas` assigns requests to arenas, and
  `arena_plan` has the values and the check of the result.
- `placement_policy` decides which storages of a program are placed in arenas.
- `kernel_order` chooses the order of the program's steps.
- `peak_report` lists what is live at the peak.

The adapters to Inductor are `inductor_ext.memory_planning` and
`inductor_ext.memory.reorder_kernels`.

Invalid input raises an error of `inductor_ext.exc`. Every returned plan has been verified.
"""
