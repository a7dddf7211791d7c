"""The extension's hooks into torch: each is declared once and acts on one compile at a time.

| module | contents |
| --- | --- |
| `registry` | installs hooks, and checks that their declarations fit the installed torch |
| `hook_table` | the declaration of every hook |
| `torch_source` | looks up torch definitions for that check, without importing torch |
| `context` | `CompileContext`: the state of one compile, in the package's only ContextVar |
| `activate` | the switch: `activate`, `install`, `uninstall` |
| `scope` | the scope of a compile: the `InductorChoices` handler that carries its settings |
| `compile_fx` | Inductor's entry point, and the compile of one graph |
| `direct_compiles` | compiles that are left to Inductor |
| `cache_keys` | keys of the FX graph cache and of the AOTAutograd cache |
| `graph_passes` | passes over FX graphs, scheduler nodes and wrapper lines |
| `aot` | C++ codegen of AOT packages |
| `wrapper_codegen` | the outermost wrapper codegen of a graph, and the objects it is linked with |
| `lowering_table` | the extension's lowerings by operator |
| `lowerings` | their dispatchers in Inductor's table of lowerings |
| `upstream_fixes` | workarounds for Inductor bugs |

A process-wide replacement is a dispatcher. If the extension is compiling in the current thread, the
dispatcher runs the extension's code; otherwise it calls the replaced function with the same
arguments. The first activation installs the dispatchers, and they stay installed. Importing this
package changes nothing in torch.
"""
