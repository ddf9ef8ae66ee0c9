"""Command: serve."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import COUNT, PATH, POSITIVE, bundle_argument, json_option, option
from bigbrain_fx.cli.output import emit
from bigbrain_fx.errors import InputError

POLL_S = 0.5


@cli.command(short_help="Answer requests over HTTP with a bundle for inference.")
@bundle_argument
@option("--host", default="127.0.0.1", help="Where to listen.")
@option("--port", type=click.IntRange(0, 65535), default=8000, help="0 is any that is free.")
@option("--token-file", "token", type=PATH, help="Clients must send this token; beyond loopback.")
@option("--queue", type=COUNT, default=64, help="Requests that may wait; more get 503.")
@option(
    "--deadline",
    "deadline_s",
    type=POSITIVE,
    default=300.0,
    help="Longest wait for an answer, in seconds.",
)
@option("--logs", type=PATH, help="Folder for the devices' logs [default: a new one].")
@json_option
def serve(
    bundle: Path,
    token: Path | None,
    as_json: bool,
    **choices: Any,  # noqa: ANN401  # the options of click
) -> None:
    """Answer requests with BUNDLE (of --mode eval), all its devices on this host.

    Requests share slots of the bundle's own batch; several slots are under way at once. Ctrl-C or
    SIGTERM ends it, after what is under way.
    """
    from bigbrain_fx.serving import ServeOptions, served

    options = ServeOptions(token=None if token is None else _token(token), **choices)
    stop = _stopped_by_signals()
    with served(bundle, options) as serving:
        rows = serving.engine.spec.rows
        paths = "POST /infer" + (", /v1/completions" if serving.generates else "")
        emit(
            as_json,
            {"url": serving.url, "rows": rows, "generates": serving.generates},
            f"serving on {serving.url}: {paths}; slots of {rows} rows, {len(serving.devices)} "
            f"devices; logs in {serving.logs}",
        )
        while not stop.wait(POLL_S):
            if serving.engine.ended is not None:
                raise serving.engine.ended


def _token(path: Path) -> str:
    try:
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the token: {error}", code="BX3526", at=str(path)) from error
    if not found:
        raise InputError(
            "the token is empty", code="BX3527", at=str(path), help="write a long random text to it"
        )
    return found


def _stopped_by_signals() -> threading.Event:
    """Return what is set by Ctrl-C and SIGTERM, where this is the main thread."""
    stop = threading.Event()

    def hear(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, hear)
    return stop
