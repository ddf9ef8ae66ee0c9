"""Search for the C++ compiler that torch.compile calls for a CPU on this host.

The module imports no torch, so that a launcher can call it before it starts any process.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from .coded import InputError


class CompilerError(InputError, RuntimeError):
    """Report a host on which stages cannot be compiled; says what to install."""


def require_compiler(device: str) -> None:
    """Refuse to compile for a CPU device on a host without a C++ compiler or Python's headers.

    Raises:
        CompilerError: says which of them is missing.
    """
    name = os.environ.get("CXX", "g++")  # as torch's inductor looks for it
    if shutil.which(name) is None:
        raise CompilerError(
            f"device {device}: its stages are compiled (split --compile), and this host has no "
            f"C++ compiler {name!r}: install g++, name another one in CXX, or split without "
            "--compile",
            code="BX5019",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise CompilerError(
            f"device {device}: its stages are compiled (split --compile), and there is no "
            f"{header}: install Python's headers (python3-dev), or split without --compile",
            code="BX5020",
        )
