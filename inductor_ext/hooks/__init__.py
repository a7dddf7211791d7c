"""The extension's hooks into torch: each is declared once and acts on one compile at a time.

| module | contents |
| --- | --- |
| `registry` | `Hook`, a declaration; installs hooks, and checks that they fit the installed torch |
| `torch_source` | looks up torch definitions for that check, without importing torch |
| `context` | `CompileContext`: the state of one compile, in the package's only ContextVar |
| `lowering_table` | the extension's lowerings by operator |
| `wrapper_codegen` | the outermost wrapper codegen of a graph, and the objects it is linked with |
| `activate` | the switch: `activate`, `install`, `uninstall` |
| `compile_fx` | Inductor's entry point, and the compile of one graph |
| `direct_compiles` | compiles that are left to Inductor |
| `cache_keys` | keys of the FX graph cache and of the AOTAutograd cache |
| `scope` | the scope of a compile: the `InductorChoices` handler that carries its settings |
| `lowering_dispatch` | dispatchers in Inductor's table of lowerings |
| `upstream_fixes` | fixes of Inductor bugs, a module per subject |
| `features` | the features, which bring their own hooks |
| `hook_table` | the table of all declarations |

The first five are below the features, which import them. A feature's module `hooks`
(`lowerings.hooks`, `memory.hooks`, `cpp_wrapper.hooks`) declares the feature's hooks in `HOOKS` and
installs its dispatchers by `install_hooks`.

A process-wide replacement is a dispatcher. If the extension is compiling in the current thread, the
dispatcher runs the extension's code; otherwise it calls the replaced function with the same
arguments. The first activation installs the dispatchers, and they stay installed. Importing this
package changes nothing in torch.
"""
