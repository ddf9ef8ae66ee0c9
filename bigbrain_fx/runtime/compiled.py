"""Stages under torch.compile: each forward for the shapes of its micro-batch.

Compiled code rounds otherwise than plain torch does, and draws otherwise: a plan whose stages draw
is refused. Two processes on one host compile the same. A stage is compiled when it first runs, its
backward when that first does. The process itself compiles: torch's own workers would outlive a
process that is killed. This file knows no devices or messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from .compiler import require_compiler
from .feature import Feature
from .limits import LONGEST_COMPILE_S
from .modules import Stage

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

_MOST_VARIANTS = 1024  # of one line of code: blocks of one class differ in numbers that it reads
_began: list[float] = []  # when a compilation under way began, on a monotonic clock


class CompiledStages(Feature):
    """Let each stage's forward be compiled when it is first called."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a ForwardDevice, which knows no compiler
        """Compile the stages of a device.

        Raises:
            CompilerError: they are for a CPU, and its compiler is not there.
        """
        if device.device.type == "cpu":
            require_compiler(device.name)
        compile_stages(device.modules.values())


def compile_stages(stages: Iterable[Stage]) -> None:
    """Let each stage's forward be compiled when it is first called."""
    _prepare()
    for stage in stages:
        stage.compile(dynamic=False)


def is_compiling() -> bool:
    """Whether this process compiles now, and not for longer than anything takes."""
    return any(time.monotonic() - began < LONGEST_COMPILE_S for began in _began)


@cache
def _prepare() -> None:
    """Tell torch's compiler, once, what holds for all stages."""
    from torch._dynamo import config
    from torch._dynamo.callback import callback_handler
    from torch._inductor import config as inductor

    inductor.compile_threads = 1
    config.recompile_limit = config.accumulated_recompile_limit = _MOST_VARIANTS
    callback_handler.register_start_callback(_begin)
    callback_handler.register_end_callback(_end)


def _begin(_: CallbackArgs) -> None:
    _began.append(time.monotonic())


def _end(_: CallbackArgs) -> None:
    _began.clear()
