"""Where forward or loss hands a torch.Generator to a draw: no draw of a bundle takes one.

This file knows calls of torch; it runs what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bigbrain_fx.frontend.translation.sources import where


def line_of_generator(run: Callable[[], object]) -> str | None:
    """Run forward once more; return the first line that draws from a generator: "model.py:88"."""
    try:
        with _Refusing():
            run()
    except _FoundError as error:
        return where(error)
    except Exception:
        return None  # others say what is wrong with it
    return None


class _FoundError(Exception):
    """A call of torch was given a generator."""


class _Refusing(TorchFunctionMode):
    """Ends with an error at the first call that is given a generator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # torch's own signature
        """Run a call of torch that is given none."""
        given = (*args, *(kwargs or {}).values())
        if any(isinstance(value, torch.Generator) for value in given):
            raise _FoundError
        return func(*args, **(kwargs or {}))
