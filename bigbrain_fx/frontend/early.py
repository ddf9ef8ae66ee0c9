"""This process as it was when the model file had been run, and model() not yet: a fork that waits.

    the file is run ─▶ Early ─▶ model(), example_batch(), a capture ...
                         └─▶ a fork of it, which answers each request in a fork of its own

What model() sets, be it where nobody looks (a context of decimal, filters of warnings, the working
directory, a number of a library), is not set there. It knows processes; it knows no model files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from bigbrain_fx.frontend.forked import apart, be_quiet
from bigbrain_fx.frontend.service import end_with_parent

Answer = Callable[[Mapping[str, Any]], Mapping[str, str]]


class Early:
    """A fork made here and now; it ends with this process, or when it is closed."""

    def __init__(self, answer: Answer) -> None:
        importlib.import_module("torch._dynamo")  # or each fork would: making an optimizer asks
        theirs, ours = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(theirs[1])
            os.close(ours[0])
            _wait(answer, theirs[0], ours[1])
        os.close(theirs[0])
        os.close(ours[1])
        self._requests: IO[str] = os.fdopen(theirs[1], "w")
        self._answers: IO[str] = os.fdopen(ours[0])

    def ask(self, request: Mapping[str, object]) -> Mapping[str, str] | None:
        """Return what is answered there; None where that takes too long, or its process is gone."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        found: Mapping[str, str] | None = json.loads(self._answers.readline() or "null")
        return found

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        os.waitpid(self.pid, 0)


def _wait(answer: Answer, requests: int, answers: int) -> None:
    """Be the fork: answer until nobody is there to ask."""
    try:
        end_with_parent()
        be_quiet()
        with os.fdopen(requests) as asked, os.fdopen(answers, "w") as said:
            for line in asked:
                said.write(json.dumps(apart(partial(answer, json.loads(line)))) + "\n")
                said.flush()
    finally:
        os._exit(0)
