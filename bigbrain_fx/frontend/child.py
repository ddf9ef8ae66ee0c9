"""The child process of a capture session: load the model file, capture, then answer requests.

Run as `python -m bigbrain_fx.frontend.child '{"location": ...}'`. Standard output carries one JSON
object a line; what the user's code prints goes to stderr. It ends with its standard input, or with
its parent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from bigbrain_fx.frontend.capture_service import CaptureService
from bigbrain_fx.frontend.opaque_service import service_of
from bigbrain_fx.frontend.prints import printed_once
from bigbrain_fx.frontend.service import Replies

_OBJECTS_A_SWEEP = 200_000
"""Objects made between two sweeps for garbage: torch's own modules are a million that all stay."""


Requests = Mapping[str, Callable[[CaptureService, Mapping[str, Any]], Mapping[str, object]]]
"""What else a child answers: "do" of a request -> its answer."""


def serve_captures(begin: Callable[[Mapping[str, Any]], Requests] = lambda _: {}) -> NoReturn:
    """Capture, report, and serve requests until standard input ends; so does this process then.

    Args:
        begin: called with what was wanted, when torch is there and the model file was not run yet.
    """
    gc.set_threshold(_OBJECTS_A_SWEEP, 20, 100)
    replies, prints = Replies(), printed_once()
    wanted = json.loads(sys.argv.pop())  # a model file may parse words of its own, and has none
    service: list[CaptureService] = []
    more: dict[str, Any] = {}

    def start() -> Mapping[str, object]:
        more.update(begin(wanted))
        service.append(service_of(wanted))
        return service[0].report()

    if replies.reply(start, "capture"):
        for line in replies.requests:
            request = json.loads(line)
            own = more.get(request["do"])
            answer = partial(own or CaptureService.serve, service[0], request)
            if own is not None:
                answer = partial(service[0].known.answer, request, answer)
            replies.reply(answer, str(request["do"]))
    if prints is not None:
        prints.finish(str(wanted["location"]))
    sys.stdout.flush()  # what the user's code printed
    sys.stderr.flush()
    os._exit(0)  # all is written; taking torch and the model down in order takes a second


if __name__ == "__main__":
    serve_captures()
