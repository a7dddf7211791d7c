"""Tasks that `aoti` runs in separate processes: a compile, a load, calls, wrong inputs.

A task is a function that takes and returns plain values. The command line takes its name, and its
arguments as JSON, and prints the result as the last line.

    python -m benchmarks.aot.child TASK ARGUMENTS
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import measure

__all__ = ["TASKS"]

Result = dict[str, Any]


# --- the resources of a process -----------------------------------------------------------------


def read_cpu_seconds() -> float:
    """Return CPU seconds, user and system, of this process and its children, also running ones."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    seconds_by_process: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # A program's name may contain any character; it ends at the last bracket.
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process] = int(fields[1])
            seconds_by_process[process] = sum(map(int, fields[11:15])) / ticks
    for process, seconds in seconds_by_process.items():
        ancestor = parents.get(process, 0)
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += seconds if ancestor else 0.0
    return total


def _reset_peak() -> int:
    """Reset the peak of resident memory; return the current resident memory in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return measure.read_resident_memory()[0]


def _read_private_bytes() -> int:
    """Return the bytes of this process's anonymous memory, which is not backed by a file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    match = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


# --- compiling ----------------------------------------------------------------------------------


def compile_(model: str, variant: str, package: str, options: Result) -> Result:
    """Compile one model into a package.

    Args:
        model: name of an entry of `aot.models.MODELS`.
        variant: "ours" or "stock".
        package: path of the package.
        options: options of the compile.

    Returns:
        CPU and wall seconds; peak resident memory in bytes above the level before, of this process
            and of its largest child; bytes of the package, of the shared object, and of the
            weights.
    """
    import torch
    import torch._inductor

    from benchmarks.aot import models as aoti_models

    module, inputs = aoti_models.MODELS[model].make()
    with torch.no_grad():
        program = torch.export.export(module, inputs)
    weights = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in program.state_dict.values()
    }
    del module
    before = _reset_peak()
    cpu, start, own = read_cpu_seconds(), time.perf_counter(), time.process_time()
    with torch.no_grad():
        if variant == "ours":
            import inductor_ext

            inductor_ext.aoti_compile_and_package(
                program, package_path=package, inductor_configs=options
            )
        else:
            torch._inductor.aoti_compile_and_package(
                program, package_path=package, inductor_configs=options
            )
    return {
        "cpu": read_cpu_seconds() - cpu,
        "python": time.process_time() - own,
        "wall": time.perf_counter() - start,
        "peak": measure.read_resident_memory()[1] - before,
        "child peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "package": os.path.getsize(package),
        "shared object": count_code_bytes(package, sum(weights.values())),
        "weights": sum(weights.values()),
    }


def count_code_bytes(package: str, weights: int) -> int:
    """Return the bytes of the shared object without weights that it may contain."""
    with zipfile.ZipFile(package) as archive:
        (library,) = (entry for entry in archive.infolist() if entry.filename.endswith(".so"))
        has_separate_weights = any(
            entry.filename.endswith(".weights") for entry in archive.infolist()
        )
    return library.file_size - (0 if has_separate_weights else weights)


# --- loading and calling ------------------------------------------------------------------------


def _load(variant: str, package: str) -> Callable[..., Any]:
    if variant == "ours":
        import inductor_ext

        return inductor_ext.load(package)
    import torch._inductor

    model: Callable[..., Any] = torch._inductor.aoti_load_package(package)
    return model


def load(model: str, variant: str, package: str) -> Result:
    """Load a package and call the model once.

    Returns:
        CPU and wall seconds of loading, including imports other than torch; resident bytes above
            the level before, after loading and after the call, their peak, and how many of them are
            private.
    """
    import torch

    inputs = _make_inputs(model)
    before, private = _reset_peak(), _read_private_bytes()
    cpu, start = read_cpu_seconds(), time.perf_counter()
    run = _load(variant, package)
    result = {"cpu": read_cpu_seconds() - cpu, "wall": time.perf_counter() - start}
    result["loaded"] = measure.read_resident_memory()[0] - before
    with torch.no_grad():
        run(*inputs)
    gc.collect()
    now, peak = measure.read_resident_memory()
    return {
        **result,
        "called": now - before,
        "private": _read_private_bytes() - private,
        "peak": peak - before,
    }


def load_cpp(package: str) -> Result:
    """Load a package with torch's C++ loader; return CPU and wall seconds."""
    import torch

    cpu, start = read_cpu_seconds(), time.perf_counter()
    loader = torch._C._aoti.AOTIModelPackageLoader(package, "model", False, 1, -1)
    result = {"cpu": read_cpu_seconds() - cpu, "wall": time.perf_counter() - start}
    assert loader is not None
    return result


def _make_inputs(model: str) -> Any:
    """Return a model's inputs, made in another process to keep the weights out of this one."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/inputs.pt"
        code = (
            "import sys, torch; from benchmarks.aot import models as aoti_models; "
            "torch.save(aoti_models.MODELS[sys.argv[1]].make()[1], sys.argv[2])"
        )
        subprocess.run([sys.executable, "-c", code, model, path], check=True)
        return torch.load(path)


def _time_calls(call: Callable[[], object], batch: int, batches: int = 20) -> float:
    """Return the seconds of one call: the minimum over batches of a batch's mean."""
    best = float("inf")
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        best = min(best, (time.perf_counter() - start) / batch)
    return best


def call(model: str, variant: str, package: str) -> Result:
    """Measure a call from Python with positional tensors and one thread, in seconds.

    Args:
        variant: "ours", "stock" or "eager"; "eager" does not use the package.
    """
    import torch

    from benchmarks.aot import models as aoti_models

    torch.set_num_threads(1)
    entry = aoti_models.MODELS[model]
    run: Callable[..., Any]
    run, inputs = entry.make()
    if variant != "eager":
        run = _load(variant, package)
    with torch.no_grad():
        run(*inputs)
        return {"seconds": _time_calls(lambda: run(*inputs), entry.batch)}


_LOOP = """
#include <stddef.h>
#include <stdint.h>
#include <time.h>
typedef int32_t (*Run)(void*, void**, size_t, void**, size_t, void*, void*);
typedef int32_t (*Copy)(void*, void**);
typedef int32_t (*Delete)(void*);
double best(Run run, Copy copy, Delete drop, void* container, void** inputs, size_t n_inputs,
            size_t n_outputs, long batch, long batches) {
  double least = 1e9;
  void* handles[64];
  void* outputs[64];
  for (long i = 0; i < batches; i++) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long j = 0; j < batch; j++) {
      for (size_t k = 0; k < n_inputs; k++) copy(inputs[k], &handles[k]);
      if (run(container, handles, n_inputs, outputs, n_outputs, 0, 0) != 0) return -1;
      for (size_t k = 0; k < n_outputs; k++) drop(outputs[k]);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double spent = (end.tv_sec - start.tv_sec) + (end.tv_nsec - start.tv_nsec) * 1e-9;
    if (spent / batch < least) least = spent / batch;
  }
  return least;
}
"""


def call_c_interface(model: str, package: str) -> Result:
    """Measure a call of the C interface alone, with tensor handles and one thread, in seconds."""
    import torch

    from benchmarks.aot import models as aoti_models

    torch.set_num_threads(1)
    entry = aoti_models.MODELS[model]
    _, inputs = entry.make()
    with tempfile.TemporaryDirectory() as folder:
        loop = Path(folder) / "loop.c"
        loop.write_text(_LOOP)
        subprocess.run(
            ["g++", "-O2", "-shared", "-fPIC", "-x", "c", str(loop), "-o", f"{folder}/loop.so"],
            check=True,
        )
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
        (path,) = Path(folder).glob("*/data/aotinductor/model/*.so")
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        container, outputs = ctypes.c_void_p(), ctypes.c_size_t()
        status = library.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None
        )
        assert status == 0
        library.AOTInductorModelContainerGetNumOutputs(container, ctypes.byref(outputs))
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(inputs))
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        arguments = (ctypes.c_void_p * len(handles))(*(get(handle, None) for handle in handles))
        shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        best = ctypes.CDLL(f"{folder}/loop.so").best
        best.restype = ctypes.c_double
        seconds = best(
            library.AOTInductorModelContainerRun,
            shim.aoti_torch_new_tensor_handle,
            shim.aoti_torch_delete_tensor_object,
            container,
            arguments,
            ctypes.c_size_t(len(handles)),
            outputs,
            ctypes.c_long(10 * entry.batch if entry.batch > 1 else 1),
            ctypes.c_long(20),
        )
    assert seconds > 0, "the model's run reports an error"
    return {"seconds": seconds}


# --- invalid inputs and packages ----------------------------------------------------------------


def make_wrong_inputs() -> dict[str, Callable[[Any], tuple[Any, ...]]]:
    """Return functions from a valid to a wrong input, for a model of one float32 tensor `[8]`."""
    import torch

    return {
        "fewer elements": lambda x: (x[:4].clone(),),
        "more elements": lambda x: (torch.cat([x, x]),),
        "another rank": lambda x: (x.reshape(2, 4),),
        "float64": lambda x: (x.double(),),
        "int8": lambda x: (x.to(torch.int8),),
        "a list": lambda x: ([x],),
        "a number": lambda x: (3,),
        "no input": lambda x: (),
        "two inputs": lambda x: (x, x),
        "other strides": lambda x: (torch.stack([x, x], dim=1)[:, 0],),
    }


def check_wrong_input(variant: str, package: str, kind: str) -> Result:
    """Whether a package of "pointwise" raises an error for a wrong input.

    "other strides" may also be accepted, if the results are correct.
    """
    import torch

    from benchmarks.aot import models as aoti_models

    module, (x,) = aoti_models.MODELS["pointwise"].make()
    run = _load(variant, package)
    wrong = make_wrong_inputs()[kind](x)
    with torch.no_grad():
        try:
            output = run(*wrong)
        except Exception as error:
            return {"refused": True, "error": f"{type(error).__name__}: {error}"}
        is_correct = kind == "other strides" and torch.equal(output, module(*wrong))
    return {"refused": bool(is_correct), "error": None}


def damage(package: str, kind: str) -> None:
    """Damage a package: flip a bit of the library, truncate it, or add a path traversal entry."""
    path = Path(package)
    if kind == "a flipped bit":
        with zipfile.ZipFile(path) as archive:
            (entry,) = (e for e in archive.infolist() if e.filename.endswith(".so"))
            content = archive.read(entry)
        data = bytearray(path.read_bytes())
        # Flip a bit in string data of the code, where the damage does not cause a crash.
        offset = content.find(b"\x7fELF") + len(content) // 3
        data[data.find(content[:4096]) + offset] ^= 0x10
        path.write_bytes(data)
    elif kind == "a truncated file":
        os.truncate(path, path.stat().st_size * 2 // 3)
    else:
        with zipfile.ZipFile(path, "a") as archive:
            root = archive.namelist()[0].split("/")[0]
            archive.writestr(f"{root}/data/aotinductor/model/../../../../escaped.txt", "x")


DAMAGES = ("a flipped bit", "a truncated file", "an entry outside")


def check_damaged_package(variant: str, package: str) -> Result:
    """Whether loading a package raises an error."""
    try:
        _load(variant, package)
    except Exception as error:
        return {"refused": True, "error": f"{type(error).__name__}: {error}"}
    return {"refused": False, "error": None}


def check_executable_stack(package: str) -> Result:
    """Whether the shared object requests an executable stack."""
    with zipfile.ZipFile(package) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        header = subprocess.run(
            ["readelf", "-lW", archive.extract(name, folder)],
            capture_output=True,
            text=True,
            check=True,
        )
    line = re.search(r"GNU_STACK.*", header.stdout)
    return {"executable": line is None or "RWE" in line[0]}


TASKS: dict[str, Callable[..., Result]] = {
    "compile": compile_,
    "load": load,
    "load_cpp": load_cpp,
    "call": call,
    "bare": call_c_interface,
    "refuse": check_wrong_input,
    "refuse_damaged": check_damaged_package,
    "executable_stack": check_executable_stack,
}
"""By name on the command line."""


if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
