"""The memory planner: from lifetimes and sizes to offsets in one arena.

Pure: it imports neither torch nor Inductor, and knows of buffers only when they are live and how
large they are. `problem` states the problem, its lower bound and the verifier that every plan
passes; `solver` finds a plan and `search` improves it; `csv_problem` reads and writes problems as
files. The adapter that makes Inductor's wrapper use a plan is `inductor_ext.memory_planning`.

Wrong input raises an error of `inductor_ext.exc`; a plan that is returned has been verified.
"""
