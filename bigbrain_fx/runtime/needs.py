"""What a program of a bundle needs before it can begin; where it is not there, a sentence says so.

Else whoever starts it by another Python, or under a limit of memory, reads a traceback of torch's.
This file is stdlib only.
"""

from __future__ import annotations

import ast
import errno
import os
import sys
from importlib import import_module
from pathlib import Path

from .coded import CodedError
from .telling import headline, tell

LONGEST_COMPILE_S = 1800.0  # of a wait for a device whose first step compiles
SHARE_GPUS = "BIGBRAIN_SHARE_GPUS"  # in the environment: processes take a host's GPUs in turn
MISSING = 2  # exit code; as of bad input
LIBRARIES = ("torch", "safetensors.torch")
NO_MEMORY = (
    *("cannot allocate memory", "failed to map segment", "std::bad_alloc"),
    *("out of memory", "not enough memory"),  # of a GPU, and torch's own on a CPU
)
MEMORY = "raise the limit of memory (`ulimit -v`; in a container its own), or free some"
GPU_MEMORY = (
    "let nothing else take the GPU's, or split for less: --activation-checkpointing all, "
    "--offload, more "
    "micro-batches, more devices"
)


class NeedsError(CodedError):
    """Report what is not there, and what to do about it.

    Attributes:
        remedy: that.
    """

    def __init__(self, what: str, remedy: str, *, code: str) -> None:
        super().__init__(f"{what}: {remedy}", code=code)
        self.what, self.remedy = what, remedy


class NoGpuError(CodedError, RuntimeError):
    """Report a plan for more GPUs than this host has."""


class CompilerError(CodedError, RuntimeError):
    """Report a host on which stages cannot be compiled; says what to install."""


def require(program: str) -> None:
    """Load torch and all that `program` and its entry point import; else say why, and end."""
    entry = getattr(sys.modules["__main__"], "__file__", None)
    try:
        require_folder()
        load(*LIBRARIES, f"{__package__}.{program}")
        if entry:
            require_files(Path(entry))
    except NeedsError as error:
        tell(headline(error))
        sys.exit(MISSING)


def require_folder() -> None:
    """See that the working directory is there: without one, MKL ends the process.

    Raises:
        NeedsError: it has been removed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise NeedsError(
            "the working directory has been removed", "cd to one that is there", code="BX5079"
        ) from error


def require_files(entry: Path) -> None:
    """Import what an entry point imports by name: the device files and the user's code beside it.

    Raises:
        NeedsError: a file is not there, or is no Python. What a line of the user's raises is left
            as it is.
    """
    for node in ast.parse(entry.read_bytes()).body:
        for name in [a.name for a in node.names] if isinstance(node, ast.Import) else []:
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                by = "" if error.name == name else f", which {name}.py imports,"
                what = f"{error.name}{by} is neither in the bundle nor in {sys.executable}"
                raise NeedsError(
                    what, "copy the bundle again, or install it there", code="BX5080"
                ) from error
            except SyntaxError as error:
                what = f"{error.filename}:{error.lineno} is no Python ({error.msg})"
                raise NeedsError(
                    what, "mend that line, or copy the bundle again", code="BX5081"
                ) from error


def load(*names: str) -> None:
    """Import modules.

    Raises:
        NeedsError: one cannot be.
    """
    for name in names:
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            raise _told(name.partition(".")[0], error) from error


def is_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left for it."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return any(words in str(error).lower() for words in NO_MEMORY)


def memory_told(error: BaseException) -> str:
    """Return in words that memory has run out, and what to do."""
    first = str(error).partition("\n")[0]
    return f"memory has run out{f' ({first})' if first else ''}: {memory_remedy(error)}"


def memory_remedy(error: BaseException) -> str:
    """Return what to do where memory has run out: a GPU's, by torch's words for it, or a host's."""
    text = str(error).lower()
    of_gpu = "out of memory" in text and any(word in text for word in ("cuda", "hip", "xpu"))
    return GPU_MEMORY if of_gpu else MEMORY


def _told(name: str, error: BaseException) -> NeedsError:
    if is_of_memory(error) or (isinstance(error, SystemError) and _is_limited()):
        return NeedsError(f"{name} cannot be loaded, for memory has run out", MEMORY, code="BX5082")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(f"{__package__}."):
        return NeedsError(f"the bundle lacks {error.name}", "copy the bundle again", code="BX5083")
    if isinstance(error, ModuleNotFoundError):
        version = ".".join(map(str, sys.version_info[:2]))
        remedy = "start it with the Python that has torch and safetensors, or install them there"
        return NeedsError(
            f"{sys.executable} (Python {version}) has no {error.name}", remedy, code="BX5084"
        )
    lines = [line for line in str(error).splitlines() if line.strip()]
    what = f"{name} cannot be loaded ({type(error).__name__}: {(lines or ['?'])[0]})"
    if "log settings" in str(error) and "TORCH_LOGS" in os.environ:
        return NeedsError(what, "unset TORCH_LOGS, or see TORCH_LOGS=help", code="BX5085")
    return NeedsError(what, f'`{sys.executable} -c "import {name}"` must work first', code="BX5086")


def _is_limited() -> bool:
    """Whether this process may have less memory than there is: C code fails in many ways then."""
    try:
        import resource
    except ImportError:  # no Unix
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
