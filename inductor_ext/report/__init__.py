"""User-facing reports about a machine, a memory plan, GEMMs and packages. One module per report.

The package is also a function: `inductor_ext.report(...)` is `compile_report.report`. A function of
that name beside the package would be replaced when the first of its modules is imported.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_ext.report.compile_report import CompileReport
    from inductor_ext.report.contents_report import ContentsReport


class _CallableModule(types.ModuleType):
    """The class of this module, which can be called."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> CompileReport | ContentsReport:
        """Compile a function, or read a package; see `report.compile_report.report`."""
        from inductor_ext.report import compile_report

        result: CompileReport | ContentsReport = compile_report.report(target, *args, **kwargs)
        return result


sys.modules[__name__].__class__ = _CallableModule
