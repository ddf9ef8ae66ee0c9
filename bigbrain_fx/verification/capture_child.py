"""The child process of a split: a capture's, in which what is written can be rehearsed, too.

Run as `python -m bigbrain_fx.verification.capture_child '{"location": ...}'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigbrain_fx.frontend import Requests, is_known_text, serve_captures


def begin(wanted: Mapping[str, Any]) -> Requests:
    """Let forks wait that have not run the model file."""
    from bigbrain_fx.verification.rehearsal import Rehearsal

    return {"rehearse": Rehearsal(is_expected=not is_known_text(wanted)).compare}


if __name__ == "__main__":
    serve_captures(begin)
