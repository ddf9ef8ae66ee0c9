"""What a child process with torch needs before it can begin, or a sentence that says why not."""

from __future__ import annotations

import os
import resource
import sys
from importlib import import_module

from bigbrain_fx.errors import InputError
from bigbrain_fx.runtime import MEMORY, is_of_memory

LIBRARIES = ("torch", "safetensors.torch")


def require_folder() -> None:
    """See that the working directory is there: without one, MKL ends the process.

    Raises:
        InputError: it has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(
            "the working directory has been removed", code="BX2002", help="cd to one that is there"
        ) from error


def load(*names: str) -> None:
    """Import modules.

    Raises:
        InputError: one cannot be.
    """
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            raise _told(name.partition(".")[0], error) from error


def _told(name: str, error: BaseException) -> InputError:
    if is_of_memory(error) or (isinstance(error, SystemError) and _is_limited()):
        what = f"{name} cannot be loaded, for memory has run out"
        return InputError(what, code="BX2003", help=MEMORY)
    if isinstance(error, ModuleNotFoundError):
        version = ".".join(map(str, sys.version_info[:2]))
        remedy = "start it with the Python that has torch and safetensors, or install them there"
        what = f"{sys.executable} (Python {version}) has no {error.name}"
        return InputError(what, code="BX2045", help=remedy)
    lines = [line for line in str(error).splitlines() if line.strip()]
    what = f"{name} cannot be loaded ({type(error).__name__}: {(lines or ['?'])[0]})"
    if "log settings" in str(error) and "TORCH_LOGS" in os.environ:
        return InputError(what, code="BX2048", help="unset TORCH_LOGS, or see TORCH_LOGS=help")
    remedy = f'`{sys.executable} -c "import {name}"` must work first'
    return InputError(what, code="BX2049", help=remedy)


def _is_limited() -> bool:
    """Whether this process may have less memory than there is: C code fails in many ways then."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
