"""Compilation of AOT packages through the artifact cache. On a hit, the package is copied.

`key` computes the cache key; an `ArtifactStore` holds the packages. The settings
`artifact_cache`, `artifact_cache_dir` and `artifact_cache_size` govern the cache; torch's
`force_disable_caches` disables it, too. Concurrent processes compile the same package only once. A
program without a key is compiled each time. A failure of the cache never fails a compile. An
`ArtifactCacheRecord` reports the outcome and the reason.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import events
from inductor_ext.cpp_wrapper.cache import key as artifact_key
from inductor_ext.cpp_wrapper.cache.fingerprint import UnkeyableError
from inductor_ext.cpp_wrapper.package.output_path import PackagePath
from inductor_ext.cpp_wrapper.records import ArtifactCacheRecord
from inductor_ext.settings import Settings, parse_bytes
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import artifact_folder

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_FILE = "model.pt2"


def open_store(settings: Settings) -> ArtifactStore:
    """Return the store of packages. Does not create or access any file."""
    return ArtifactStore(
        artifact_folder(settings.artifact_cache_dir),
        parse_bytes(settings.artifact_cache_size),
        events.warn_once,
    )


def compile_or_copy(
    programs: Mapping[str, ExportedProgram],
    target: PackagePath | None,
    patches: Mapping[str, Any],
    settings: Settings,
    compile_: Callable[[PackagePath | None], str | IO[bytes]],
    extra: Callable[[ExportedProgram], Any],
) -> str | IO[bytes]:
    """Compile programs into a package, or copy the package from the cache.

    Args:
        programs: exported programs by model name in the package.
        target: a path, a writable buffer, or None for a path in Inductor's cache folder.
        patches: options of Inductor for the compile.
        settings: settings of the extension for the compile.
        compile_: compiles into a target and returns the target, or the path chosen for None.
        extra: returns plain values that the compiled model depends on besides the program, the
            options and the process, such as tuning results; only called if the cache is enabled.

    Returns:
        The path or the buffer.
    """
    start = time.perf_counter()

    def emit(state: str, key: str | None = None, why: str | None = None) -> None:
        seconds = round(time.perf_counter() - start, 3)
        record = ArtifactCacheRecord(state=state, key=key, why=why, seconds=seconds)
        events.emit(record, event_log=settings.event_log)

    why = _find_obstacle(patches, settings)
    if why is not None:
        emit("off", why=why)
        return compile_(target)
    key, why = _compute_key(programs, target, patches, settings, extra)
    if key is None:
        emit("bypass", why=why)
        return compile_(target)
    store = open_store(settings)
    path = _choose_path(key) if target is None else target
    if _copy_cached(store, key, path):
        emit("hit", key)
        return _to_result(path)
    with store.lock(key):
        # Another process may have compiled it while this one waited for the lock.
        if _copy_cached(store, key, path):
            emit("hit", key)
            return _to_result(path)
        emit("miss", key)
        return _compile_and_store(store, key, path, compile_)


def _find_obstacle(patches: Mapping[str, Any], settings: Settings) -> str | None:
    """Return why the cache is disabled for this compile, or None."""
    import torch.compiler.config
    from torch._inductor import config as inductor_config

    if not settings.artifact_cache:
        return "artifact_cache is False"
    if torch.compiler.config.force_disable_caches:
        return "torch's caches are disabled"
    # These options write files next to the package, which a copy from the cache would lack.
    if settings.aot_weights_file is not None:
        return "the weights stay outside the package"
    if settings.aot_self_test:
        return "the self test depends on the values of the example inputs"
    if settings.aot_debug_info:
        return "debug information stays outside the package"
    for name in ("trace.enabled", "aot_inductor.output_path", "aot_inductor.dump_aoti_minifier"):
        if patches.get(name, inductor_config.get_config_copy().get(name)):
            return f"{name} writes files outside the package"
    return None


def _compute_key(
    programs: Mapping[str, ExportedProgram],
    target: PackagePath | None,
    patches: Mapping[str, Any],
    settings: Settings,
    extra: Callable[[ExportedProgram], Any],
) -> tuple[str | None, str | None]:
    """Return (key, None) of a package, or (None, reason) if it has no key."""
    # The name of the file is also the name of the root folder in it.
    name = os.path.basename(os.fspath(target)) if isinstance(target, (str, os.PathLike)) else None
    digests = []
    for model, program in programs.items():
        try:
            values = (model, name, extra(program))
            digests.append(artifact_key.compute_key(program, settings, patches, values))
        except UnkeyableError as error:
            return None, str(error)
        except Exception as error:
            # For example with an untested version of torch, whose compile may still work.
            return None, f"the key cannot be computed: {type(error).__name__}: {error}"
    return hashlib.sha256(repr(digests).encode()).hexdigest(), None


def _choose_path(key: str) -> str | None:
    """Return a path for a package without a target; None if its folder cannot be created."""
    folder = artifact_folder().parent / "packages" / key[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder / _FILE)


def _copy_cached(store: ArtifactStore, key: str, target: PackagePath | None) -> bool:
    if target is None:
        return False
    if isinstance(target, (str, os.PathLike)):
        return store.fetch(key, {_FILE: target})
    with store.get(key) as folder:
        if folder is None:
            return False
        with open(folder / _FILE, "rb") as file:
            shutil.copyfileobj(file, target)
        return True


def _compile_and_store(
    store: ArtifactStore,
    key: str,
    target: PackagePath | None,
    compile_: Callable[[PackagePath | None], str | IO[bytes]],
) -> str | IO[bytes]:
    if target is None or isinstance(target, (str, os.PathLike)):
        path = compile_(target)
        assert isinstance(path, str)
        store.put(key, {_FILE: path})
        return path
    # Compile to a temporary file, because the target buffer may not be readable.
    with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
        compile_(file)
        file.flush()
        store.put(key, {_FILE: file.name})
        file.seek(0)
        shutil.copyfileobj(file, target)
    return target


def _to_result(target: PackagePath | None) -> str | IO[bytes]:
    assert target is not None
    return os.fspath(target) if isinstance(target, (str, os.PathLike)) else target
