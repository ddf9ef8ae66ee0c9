"""HTTP in front of an engine: routes, limits, tokens, clients that leave. The standard library.

GET  /health            what it is doing; 503 while processes are started again
POST /infer             JSON or safetensors: inputs by name, any number of rows up to a slot's
POST /v1/completions    text, at once or as a stream of events, as OpenAI's
GET  /v1/models
"""

from __future__ import annotations

import codecs
import hmac
import json
import math
import select
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any, TypeAlias

from bigbrain_fx.bundles.serving.cached import CachedText
from bigbrain_fx.bundles.serving.choosing import chooser, sampling_of
from bigbrain_fx.bundles.serving.engine import Engine, QueueFullError, Request, UnansweredError
from bigbrain_fx.bundles.serving.generating import BYTES, WholeText, answered
from bigbrain_fx.bundles.serving.rows import Raw, RawTensor, decode, encode, kind_of, of_json
from bigbrain_fx.errors import InputError

TENSORS = "application/octet-stream"
JSON_BYTES = 32  # of a number, at most
ROOM_BYTES = 1 << 16  # for names and headers
IDLE_S = 30.0  # who connects and says nothing holds a thread for so long
Writer: TypeAlias = WholeText | CachedText
_KNOWN = (
    *("prompt", "max_tokens", "stream", "model", "n", "user"),
    *("temperature", "top_p", "top_k", "seed", "stop_token_ids"),
)


class HttpError(Exception):
    """Say what is wrong with a request: a status and words."""

    def __init__(self, status: int, what: str, *, code: str, **headers: str) -> None:
        super().__init__(what)
        self.code = code
        self.status, self.headers = status, {n.replace("_", "-"): v for n, v in headers.items()}


class Front(ThreadingHTTPServer):
    """What listens, from its first moment on; a thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], token: str | None, deadline_s: float) -> None:
        super().__init__(address, _Handler)
        self.token, self.deadline_s = token, deadline_s

    def open(self, engine: Engine, model: str, writer: Writer | str) -> None:
        """Say who answers; who connected before has waited."""
        self.engine, self.model, self.writer = engine, model, writer
        numbers = sum(math.prod(shape) for _, shape in engine.spec.inputs.values())
        numbers += 0 if isinstance(writer, str) else writer.length  # of a prompt
        self.most_bytes = JSON_BYTES * numbers + ROOM_BYTES

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that left in the middle."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: Front
    begun = False  # an answer of several pieces

    def do_GET(self) -> None:  # http.server's name
        self._answered(self._get)

    def do_POST(self) -> None:  # http.server's name
        self._answered(self._post)

    def log_message(self, *_: object) -> None:
        """Say nothing of who asked."""

    def _answered(self, handle: Any) -> None:  # noqa: ANN401  # a method of this class
        try:
            self._require_token()
            handle()
        except HttpError as error:
            self._refuse(error.status, str(error), error.code, error.headers)
        except InputError as error:
            help_ = f" ({error.help})" if error.help else ""
            self._refuse(400, f"{error.what}{help_}", error.code)
        except QueueFullError as error:
            self._refuse(503, str(error), error.code, {"Retry-After": str(error.retry_s)})
        except UnansweredError as error:
            self._refuse(503, str(error), error.code, {"Retry-After": "1"})
        except OSError:  # the client has gone
            self.close_connection = True

    def _require_token(self) -> None:
        wanted = self.server.token
        given = self.headers.get("Authorization", "")
        if wanted is not None and not hmac.compare_digest(
            given.encode(), f"Bearer {wanted}".encode()
        ):
            self.close_connection = True
            raise HttpError(
                401,
                "expected Authorization: Bearer TOKEN",
                code="BX3151",
                WWW_Authenticate="Bearer",
            )

    # ------------------------------------------------------------------ routes

    def _get(self) -> None:
        if self.path == "/health":
            self._say(200 if self.server.engine.is_ready else 503, self._health())
        elif self.path == "/v1/models":
            entry = {"id": self.server.model, "object": "model", "owned_by": "bigbrain-fx"}
            self._say(200, {"object": "list", "data": [entry]})
        else:
            raise HttpError(
                404, f"there is nothing at {self.path}: POST /infer, GET /health", code="BX3152"
            )

    def _health(self) -> dict[str, object]:
        engine = self.server.engine
        return {
            "status": "ok" if engine.is_ready else "starting",
            "model": self.server.model,
            "rows": engine.spec.rows,
            "inputs": {n: [dtype, shape] for n, (dtype, shape) in engine.spec.inputs.items()},
            "waiting": engine.waiting,
            "under_way": engine.under_way,
            "generates": not isinstance(self.server.writer, str),
            **asdict(engine.counted),
        }

    def _post(self) -> None:
        routes = {"/infer": self._infer, "/v1/completions": self._complete}
        if self.path not in routes:
            self.close_connection = True
            raise HttpError(
                404, f"there is nothing at {self.path}: {', '.join(routes)}", code="BX3153"
            )
        routes[self.path](self._body())

    def _body(self) -> bytes:
        """Read the body; one that is too long is not read."""
        text = self.headers.get("Content-Length")
        if text is None or not text.isdecimal():
            self.close_connection = True
            raise HttpError(411, "expected a Content-Length", code="BX3154")
        most = self.server.most_bytes
        if int(text) > most:
            self.close_connection = True
            raise HttpError(
                413,
                f"the body has {text} bytes, and a slot's rows take {most} at most",
                code="BX3155",
            )
        found = self.rfile.read(int(text))
        if len(found) < int(text):
            raise ConnectionError("the client has gone")
        return found

    def _infer(self, body: bytes) -> None:
        if isinstance(self.server.writer, CachedText):
            raise HttpError(
                400,
                "this bundle keeps keys and values in rows that are the server's to give: POST "
                "/v1/completions (for scores of whole rows split without --cache)",
                code="BX3156",
            )
        is_raw = self.headers.get_content_type() == TENSORS
        tensors = self._inputs(decode(body) if is_raw else _object(body).get("inputs"))
        request = Request(tensors, self._rows(tensors), self._is_gone)
        outputs = answered(self.server.engine, request, self.server.deadline_s)
        rows = [request.start, request.start + request.rows]
        if is_raw:
            where = {"X-Slot": str(request.slot), "X-Rows": f"{rows[0]}-{rows[1]}"}
            self._write(200, encode(outputs), TENSORS, where)
        else:
            values = {name: raw.values() for name, raw in outputs.items()}
            self._say(200, {"outputs": values, "slot": request.slot, "rows": rows})

    def _inputs(self, given: object) -> Raw:
        spec = self.server.engine.spec
        if not isinstance(given, Mapping) or set(given) != set(spec.inputs):
            found = ", ".join(map(str, given)) if isinstance(given, Mapping) else "none"
            raise InputError(
                f"expected inputs {', '.join(spec.inputs)}, found {found}", code="BX3122"
            )
        return {name: self._input(name, given[name]) for name in spec.inputs}

    def _input(self, name: str, content: object) -> RawTensor:
        dtype, shape = self.server.engine.spec.inputs[name]
        kind = kind_of(dtype)
        raw = content if isinstance(content, RawTensor) else of_json(name, content, kind, shape)
        is_whole = name in self.server.engine.spec.whole
        fits = raw.shape == shape if is_whole else raw.shape[1:] == shape[1:] and raw.shape
        if raw.kind != kind or not fits:
            rows = "" if is_whole else ", of any number of rows"
            raise InputError(
                f"input {name!r} is {raw.kind}{list(raw.shape)}, "
                f"expected {kind}{list(shape)}{rows}",
                code="BX3123",
            )
        return raw

    def _rows(self, tensors: Raw) -> int:
        spec = self.server.engine.spec
        counts = {raw.shape[0] for name, raw in tensors.items() if name not in spec.whole}
        if len(counts) > 1 or 0 in counts:
            raise InputError(
                f"the inputs need one number of rows, found {sorted(counts)}", code="BX3124"
            )
        rows = counts.pop() if counts else spec.rows
        if rows > spec.rows:
            raise HttpError(
                413,
                f"{rows} rows in a request, and a slot has {spec.rows}: send several requests",
                code="BX3157",
            )
        return rows

    # ------------------------------------------------------------------ text

    def _complete(self, body: bytes) -> None:
        writer = self.server.writer
        if isinstance(writer, str):
            raise HttpError(
                400, f"this model does not generate text: {writer}; POST /infer", code="BX3158"
            )
        asked = _object(body)
        _require_known(asked)
        prompt, count = _prompt(asked.get("prompt"), writer), asked.get("max_tokens", 16)
        if not isinstance(count, int) or isinstance(count, bool):
            raise InputError(
                f"expected a whole number of max_tokens, found {count!r}", code="BX3125"
            )
        choose, stops = chooser(sampling_of(asked)), _stops(asked)
        made = writer.tokens(prompt, count, Request({}, 0, self._is_gone), choose)
        with closing(made):  # a text that ends early gives its row back
            tokens = _until(made, stops)
            if asked.get("stream"):
                self._stream(tokens, writer, stops)
                return
            found = list(tokens)
        text = _text(found, stops) if writer.words == BYTES else ""
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(found)}
        usage["total_tokens"] = len(prompt) + len(found)
        self._say(200, {**self._completion(text, found, _end(found[-1], stops)), "usage": usage})

    def _completion(self, text: str, tokens: list[int], why: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "tokens": tokens, "logprobs": None}
        return {
            "id": f"cmpl-{id(self):x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.server.model,
            "choices": [{**choice, "finish_reason": why}],
        }

    def _stream(self, tokens: Iterator[int], writer: Writer, stops: Collection[int]) -> None:
        """Send an event for each token, and one that says why it ends.

        Errors before the first one have a status.
        """
        first = last = next(tokens)
        self.begun = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for last in chain((first,), tokens):
            shown = writer.words == BYTES and last not in stops
            self._event(decoder.decode(bytes([last])) if shown else "", [last], None)
        self._event(decoder.decode(b"", final=True), [], _end(last, stops))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, text: str, tokens: list[int], why: str | None) -> None:
        content = json.dumps(self._completion(text, tokens, why))
        self._chunk(f"data: {content}\n\n".encode())

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    # ------------------------------------------------------------------ answers

    def _is_gone(self) -> bool:
        """Whether the client has closed its end."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _say(self, status: int, content: object) -> None:
        try:
            text = json.dumps(content, allow_nan=False)
        except ValueError:
            status, text = (
                422,
                json.dumps(
                    _error(
                        "the outputs have NaN or infinity, which JSON lacks: ask for safetensors",
                        code="BX3121",
                    )
                ),
            )
        self._write(status, text.encode(), "application/json", {})

    def _refuse(
        self, status: int, what: str, code: str | None, headers: Mapping[str, str] | None = None
    ) -> None:
        if self.begun:  # in the middle of a stream: its end says that it is not whole
            self.close_connection = True
            return
        content = json.dumps(_error(what, code=code)).encode()
        try:
            self._write(status, content, "application/json", headers or {})
        except OSError:
            self.close_connection = True

    def _write(self, status: int, content: bytes, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)


def _error(what: str, *, code: str | None) -> dict[str, object]:
    return {"error": {"message": what, "code": code}}


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}", code="BX3126") from error
    if not isinstance(found, dict):
        raise InputError("expected a JSON object", code="BX3127")
    return found


def _require_known(asked: Mapping[str, Any]) -> None:
    """Refuse what would be answered otherwise than it was asked."""
    unknown = sorted(set(asked) - set(_KNOWN))
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is not known here: {', '.join(_KNOWN)} are", code="BX3128"
        )
    if asked.get("n", 1) != 1:
        raise InputError("one text is generated at a time: n is 1", code="BX3129")


def _stops(asked: Mapping[str, Any]) -> frozenset[int]:
    given = asked.get("stop_token_ids", [])
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise InputError(
            f"expected stop_token_ids to be a list of tokens, found {given!r}", code="BX3130"
        )
    return frozenset(given)


def _until(tokens: Iterator[int], stops: Collection[int]) -> Iterator[int]:
    """Yield tokens up to one that ends the text, that one included."""
    for token in tokens:
        yield token
        if token in stops:
            return


def _text(tokens: Sequence[int], stops: Collection[int]) -> str:
    return bytes(token for token in tokens if token not in stops).decode("utf-8", "replace")


def _end(last: int, stops: Collection[int]) -> str:
    return "stop" if last in stops else "length"


def _prompt(given: object, writer: Writer) -> list[int]:
    if isinstance(given, str):
        if writer.words != BYTES:
            raise InputError(
                "there is no tokenizer here: give the prompt as a list of tokens", code="BX3131"
            )
        return list(given.encode())
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise InputError(
            "expected a prompt: a list of tokens, or a string for a model of bytes", code="BX3132"
        )
    return given
