"""The process of the plain training loop: it runs steps as asked, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from bigbrain_fx.frontend import ModelFile, where
from bigbrain_fx.verification.eager import TrainingLoop, Wanted
from bigbrain_fx.verification.opaque_loop import OpaqueLoop

Load = Callable[[Wanted], ModelFile]


def serve(wanted: Wanted, load: Load, requests: IO[str], answers: IO[str]) -> None:
    """Run steps as asked, one JSON object a line each way, until the requests end."""
    loop: list[TrainingLoop] = []
    for line in requests:
        try:
            kind = OpaqueLoop if wanted.call else TrainingLoop
            loop = loop or [kind(wanted, load)]
            answer = _answer(loop[0], json.loads(line))
        except StopIteration:
            answer = {"ended": True}
        except Exception as error:  # the user's own code
            first = (str(error).splitlines() or [""])[0]
            at = where(error) or Path(wanted.location).name
            answer = {"error": f"{type(error).__name__}: {first} ({at})"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(loop: TrainingLoop, request: Mapping[str, Any]) -> dict[str, object]:
    folder = Path(request["folder"])
    if "state" in request:
        return loop.run_exactly(request["step"], request["state"], folder)
    return loop.run_step(folder)
