"""Run one scenario of the switch in a separate process and print its observations as JSON.

`python -m test.support.children.switch_probe SCENARIO FOLDER`; the scenarios are the functions
below whose names begin with `scenario_`. Used by test/hooks/test_no_effect_on_stock.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w).sum(-1) + x.mean()


@contextlib.contextmanager
def observe(cache_folder: str) -> Iterator[dict[str, Any]]:
    """Collect the cache keys that are computed and the code that is generated inside."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.graph import GraphLowering

    seen: dict[str, Any] = {"fx": [], "autograd": [], "code": []}
    prepare_key = FxGraphCache.prepare_key
    autograd_key = autograd_cache.autograd_cache_key
    save_output_code = GraphLowering.save_output_code

    def spy_prepare(*args: Any, **kwargs: Any) -> Any:
        answer = prepare_key(*args, **kwargs)
        seen["fx"].append(answer[0][0])
        return answer

    def spy_autograd(*args: Any, **kwargs: Any) -> Any:
        answer = autograd_key(*args, **kwargs)
        seen["autograd"].append(answer[0])
        return answer

    def spy_code(code: str) -> None:
        # The code names its graph by a count of the graphs that the process has compiled so far.
        code = re.sub(r"(# AOT ID: \[')\d+", r"\1N", code)
        seen["code"].append(code.replace(cache_folder, "<cache>"))

    FxGraphCache.prepare_key = spy_prepare
    autograd_cache.autograd_cache_key = spy_autograd
    GraphLowering.save_output_code = staticmethod(spy_code)
    try:
        yield seen
    finally:
        FxGraphCache.prepare_key = prepare_key
        autograd_cache.autograd_cache_key = autograd_key
        GraphLowering.save_output_code = staticmethod(save_output_code)


def train_once(cache_folder: str, **compile_kwargs: Any) -> dict[str, Any]:
    """Compile `model` forward and backward; the keys, the code and whether the result is right."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(8, 16, requires_grad=True)
    with observe(cache_folder) as seen:
        out = torch.compile(model, **compile_kwargs)(x, w)
        gradients = torch.autograd.grad(out.sum(), (x, w))
    expected = model(x, w)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), (x, w)))
    seen["counters"] = {
        "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
        "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
        "autograd_hit": counters["aot_autograd"]["autograd_cache_hit"],
        "autograd_miss": counters["aot_autograd"]["autograd_cache_miss"],
    }
    return seen


def scenario_stock_alone(folder: str) -> dict[str, Any]:
    stock = train_once(folder, backend="inductor")
    return {"stock": stock, "imported": "inductor_ext" in sys.modules}


def scenario_stock_after_ours(folder: str) -> dict[str, Any]:
    import inductor_ext
    from inductor_ext.storage import digest

    seen = {"ours": train_once(folder, backend="inductor_ext")}
    other = {"fallback_to_eager": False}
    seen["other_setting"] = train_once(folder, backend="inductor_ext", options=other)
    with inductor_ext.activate():
        seen["activated"] = train_once(folder, backend="inductor")
    inductor_ext.install()
    seen["installed"] = train_once(folder, backend="inductor")
    inductor_ext.uninstall()
    original, digest.source_key = digest.source_key, lambda: "0" * 16
    seen["changed_source"] = train_once(folder, backend="inductor_ext")
    digest.source_key = original
    seen["stock"] = train_once(folder, backend="inductor")
    off = {"enabled": False}
    seen["disabled"] = train_once(folder, backend="inductor_ext", options=off)
    return seen


def scenario_again(folder: str) -> dict[str, Any]:
    first = train_once(folder, backend="inductor_ext")
    with torch._functorch.config.patch(enable_autograd_cache=False):
        second = train_once(folder, backend="inductor_ext")
    return {"autograd": first, "fx": second}


def scenario_replacements(folder: str) -> dict[str, Any]:
    """Dotted paths of the extension's objects in torch after compiles of every kind."""
    import inductor_ext

    package = os.path.dirname(inductor_ext.__file__)
    train_once(folder, backend="inductor_ext")
    x = torch.randn(4, 8)
    program = torch.export.export(torch.nn.Linear(8, 8), (x,))
    path = os.path.join(folder, "model.pt2")
    # A package from the cache would install no hooks.
    with torch.compiler.config.patch(force_disable_caches=True):
        inductor_ext.aoti_compile_and_package(program, package_path=path)

    def is_ours(value: Any) -> bool:
        # Reading attributes of other objects of torch may initialize a device.
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        if not isinstance(value, types.FunctionType):
            return False
        return value.__code__.co_filename.startswith(package + os.sep)

    names = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if is_ours(value) or type(value).__module__.startswith("inductor_ext."):
                names.add(f"{name}.{key}")
            if isinstance(value, type) and value.__module__ == name:
                names |= {f"{name}.{key}.{part}" for part, v in vars(value).items() if is_ours(v)}
    from torch._inductor import lowering

    ours = [str(operator) for operator, entry in lowering.lowerings.items() if is_ours(entry)]
    return {"replaced": sorted(names), "lowerings": sorted(ours)}


def scenario_import_only(folder: str) -> dict[str, Any]:
    import torch._dynamo.backends.registry
    import torch._inductor.async_compile
    import torch._inductor.compile_fx
    import torch._inductor.lowering
    import torch.export
    from torch._inductor import config, virtualized

    def state() -> dict[str, Any]:
        attributes = {
            f"{name}.{key}": id(value)
            for name, module in list(sys.modules.items())
            if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType)
            for key, value in vars(module).items()
            if not isinstance(value, types.ModuleType) and not key.startswith("__")
        }
        return {
            "attributes": attributes,
            "lowerings": {str(k): id(v) for k, v in torch._inductor.lowering.lowerings.items()},
            "config": repr(config.save_config_portable(ignore_private_configs=False)),
            "thread": sorted(vars(virtualized.threadlocal)),
            "modules": sorted(name for name in sys.modules if name.split(".")[0] == "torch"),
            "environment": dict(os.environ),
        }

    before = state()
    import inductor_ext
    import inductor_ext.aot
    import inductor_ext.backend
    import inductor_ext.hooks.hook_table
    import inductor_ext.options

    for name in inductor_ext.__all__:
        getattr(inductor_ext, name)
    after = state()
    return {
        part: sorted(
            key
            for key in {*before[part], *after[part]}
            if before[part].get(key) != after[part].get(key)
        )
        if isinstance(before[part], dict)
        else before[part] == after[part]
        for part in before
    }


def main() -> None:
    scenario, folder = sys.argv[1:]
    print(json.dumps(globals()[f"scenario_{scenario}"](folder)))


if __name__ == "__main__":
    main()
