"""Everything that the extension does to torch: declared once, in effect in one compile at a time.

| module | holds |
| --- | --- |
| `registry` | the declaration of every hook, and the check that they fit the installed torch |
| `torch_source` | what that check reads from torch's source files, without importing torch |
| `context` | `CompileContext`: the state of one compile, in the one ContextVar of the package |
| `activate` | the switch: `activate`, `install`, `uninstall` |
| `scope` | the scope of a compile: the `InductorChoices` handler that carries its settings |
| `compile_fx` | the entry point of Inductor, and the compile of one graph |
| `direct_compiles` | compiles that are left to Inductor |
| `cache_keys` | keys of the FX graph cache and of the AOTAutograd cache |
| `graph_passes` | passes over FX graphs, scheduler nodes and wrapper lines |
| `aot` | C++ of AOT packages |
| `lowerings` | Inductor's table of lowerings |
| `upstream_fixes` | workarounds for defects of Inductor, each with the torch that ends it |

A process-wide replacement is a dispatcher: it asks whether a compile of the extension is running in
this thread, and otherwise calls what it has replaced, with the same arguments. Dispatchers are put
in place by the first activation and stay; importing this package changes nothing.
"""
