"""The probe for Python's C headers."""

from __future__ import annotations

import os
import sys
import sysconfig

from inductor_ext.toolchain.probes.common import Finding, Probe


def _headers_inputs() -> tuple[tuple[str, ...]]:
    folders = (sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix"))
    return (tuple(dict.fromkeys(folder for folder in folders if folder)),)


def _examine_python_headers(folders: tuple[str, ...]) -> Finding:
    for folder in folders:
        header = os.path.join(folder, "Python.h")
        if os.path.isfile(header):
            return Finding(path=header)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Finding(
        why=f"there is no Python.h in {' or '.join(folders)}",
        install=f"apt-get install python{version}-dev (Debian, Ubuntu) or dnf install "
        f"python{version}-devel (Fedora), or use a Python that comes with its headers",
    )


PYTHON_HEADERS = Probe("Python's C headers", _headers_inputs, _examine_python_headers)
