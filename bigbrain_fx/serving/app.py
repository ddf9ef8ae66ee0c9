"""HTTP in front of an engine: a starlette application, which uvicorn runs on a thread of its own.

GET  /health            what it is doing; 503 while processes are started again
POST /infer             JSON or safetensors: inputs by name, any number of rows up to a slot's
POST /v1/completions    text, at once or as a stream of events, as OpenAI's
GET  /v1/models
"""

from __future__ import annotations

import asyncio
import codecs
import hmac
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
)
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import anyio
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bigbrain_fx.errors import InputError
from bigbrain_fx.serving.cached import CachedText
from bigbrain_fx.serving.engine import Engine, Request, UnansweredError
from bigbrain_fx.serving.generation import BYTES, answered
from bigbrain_fx.serving.requests import (
    HttpError,
    Writer,
    end_of,
    inputs_of,
    object_of,
    prompt_of,
    require_known,
    rows_of,
    stops_of,
    text_of,
    until,
)
from bigbrain_fx.serving.rows import decode, encode
from bigbrain_fx.serving.sampling import chooser, sampling_of

TENSORS = "application/octet-stream"
JSON_BYTES = 32  # of a number, at most
ROOM_BYTES = 1 << 16  # for names and headers
DRAINED_BYTES = 1 << 20  # of a body that is refused: so that its sender reads why
QUIET: dict[str, Any] = {
    **{"log_config": None, "log_level": "critical", "access_log": False, "lifespan": "off"},
    "timeout_keep_alive": 30,  # of a connection without requests
    "timeout_graceful_shutdown": 5,  # of answers that are being sent when the server ends
}

Gone = Callable[[], bool]
Handle = Callable[[HttpRequest], Awaitable[Response]]
T = TypeVar("T")


class Front:
    """The listening socket; connections before `open` wait.

    What waits for the engine runs in threads, as many as there may be requests.

    Raises:
        OSError, OverflowError: the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int], token: str | None, deadline_s: float) -> None:
        self.socket = socket.create_server(address, backlog=128)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self.token, self.deadline_s = token, deadline_s
        self.threads = anyio.CapacityLimiter(math.inf)  # the engine's queue is what is limited

    def open(self, engine: Engine, model: str, writer: Writer | str) -> None:
        """Say who answers, and answer."""
        self.engine, self.model, self.writer = engine, model, writer
        numbers = sum(math.prod(shape) for _, shape in engine.spec.inputs.values())
        numbers += 0 if isinstance(writer, str) else writer.length  # of a prompt
        self.most_bytes = JSON_BYTES * numbers + ROOM_BYTES
        self.server = uvicorn.Server(uvicorn.Config(self._application(), **QUIET))
        run = partial(self.server.run, sockets=[self.socket])
        self.thread = threading.Thread(target=run, daemon=True, name="http")
        self.thread.start()

    def stop(self) -> None:
        """Take no more requests; `thread` ends when all answers have left."""
        self.server.should_exit = True

    def _application(self) -> Starlette:
        routes = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/infer"): self._infer,
            ("POST", "/v1/completions"): self._complete,
            ("GET", "/{path:path}"): self._nothing,
            ("POST", "/{path:path}"): self._nothing,
        }
        found = [
            Route(path, self._guarded(do), methods=[way]) for (way, path), do in routes.items()
        ]
        return Starlette(routes=found)

    def _guarded(self, handle: Handle) -> Handle:
        """Ask for the token first; answer errors with their status."""

        async def endpoint(request: HttpRequest) -> Response:
            try:
                self._require_token(request)
                return await handle(request)
            except HttpError as error:
                return _refusal(error.status, str(error), code=error.code, headers=error.headers)
            except InputError as error:
                help_ = f" ({error.help})" if error.help else ""
                return _refusal(400, f"{error.what}{help_}", code=error.code)
            except UnansweredError as error:
                retry_s = getattr(error, "retry_s", 1)
                return _refusal(
                    503, str(error), code=error.code, headers={"Retry-After": str(retry_s)}
                )
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it

        return endpoint

    def _require_token(self, request: HttpRequest) -> None:
        given = request.headers.get("authorization", "").encode()
        if self.token is not None and not hmac.compare_digest(
            given, f"Bearer {self.token}".encode()
        ):
            raise HttpError(
                401,
                "expected Authorization: Bearer TOKEN",
                code="BX3151",
                WWW_Authenticate="Bearer",
                Connection="close",
            )

    # ------------------------------------------------------------------ what there is

    async def _health(self, _: HttpRequest) -> Response:
        engine = self.engine
        found = {
            "status": "ok" if engine.is_ready else "starting",
            "model": self.model,
            "rows": engine.spec.rows,
            "inputs": {n: [dtype, shape] for n, (dtype, shape) in engine.spec.inputs.items()},
            "waiting": engine.waiting,
            "under_way": engine.under_way,
            "generates": not isinstance(self.writer, str),
            **asdict(engine.counted),
        }
        return _json(200 if engine.is_ready else 503, found)

    async def _models(self, _: HttpRequest) -> Response:
        entry = {"id": self.model, "object": "model", "owned_by": "bigbrain-fx"}
        return _json(200, {"object": "list", "data": [entry]})

    async def _nothing(self, request: HttpRequest) -> Response:
        raise HttpError(
            404,
            f"there is nothing at {request.url.path}: POST /infer, /v1/completions, GET /health",
            code="BX3152",
        )

    # ------------------------------------------------------------------ rows

    async def _infer(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        return await self._waiting(request, partial(self._inferred, body, kind == TENSORS))

    async def _body(self, request: HttpRequest) -> bytes:
        """Read the body; one that is too long is not kept."""
        text = request.headers.get("content-length", "")
        if not text.isdecimal():
            raise HttpError(411, "expected a Content-Length", code="BX3154", Connection="close")
        if int(text) > self.most_bytes:
            await _drain(request)
            raise HttpError(
                413,
                f"the body has {text} bytes, and a slot's rows take {self.most_bytes} at most",
                code="BX3155",
                Connection="close",
            )
        return await request.body()

    async def _waiting(self, request: HttpRequest, work: Callable[[Gone], T]) -> T:
        """Do something that waits, in a thread; it is told whether the client has gone."""
        gone = threading.Event()
        watch = asyncio.create_task(_watched(request, gone))
        try:
            return await self._in_thread(partial(work, gone.is_set))
        finally:
            watch.cancel()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await to_thread.run_sync(work, limiter=self.threads)

    def _inferred(self, body: bytes, is_raw: bool, is_gone: Gone) -> Response:
        if isinstance(self.writer, CachedText):
            raise HttpError(
                400,
                "this bundle keeps keys and values in rows that are the server's to give: POST "
                "/v1/completions (for scores of whole rows split without --kv-cache)",
                code="BX3156",
            )
        spec = self.engine.spec
        tensors = inputs_of(decode(body) if is_raw else object_of(body).get("inputs"), spec)
        asked = Request(tensors, rows_of(tensors, spec), is_gone)
        outputs = answered(self.engine, asked, self.deadline_s)
        rows = [asked.start, asked.start + asked.rows]
        if is_raw:
            where = {"X-Slot": str(asked.slot), "X-Rows": f"{rows[0]}-{rows[1]}"}
            return Response(encode(outputs), media_type=TENSORS, headers=where)
        values = {name: raw.values() for name, raw in outputs.items()}
        return _json(200, {"outputs": values, "slot": asked.slot, "rows": rows})

    # ------------------------------------------------------------------ text

    async def _complete(self, request: HttpRequest) -> Response:
        body, gone = await self._body(request), threading.Event()
        writer = self.writer
        if isinstance(writer, str):
            raise HttpError(
                400, f"this model does not generate text: {writer}; POST /infer", code="BX3158"
            )
        asked = object_of(body)
        require_known(asked)
        prompt, count = prompt_of(asked.get("prompt"), writer), asked.get("max_tokens", 16)
        if not isinstance(count, int) or isinstance(count, bool):
            raise InputError(
                f"expected a whole number of max_tokens, found {count!r}", code="BX3125"
            )
        choose, stops = chooser(sampling_of(asked)), stops_of(asked)
        made = writer.tokens(prompt, count, Request({}, 0, gone.is_set), choose)
        watch = asyncio.create_task(_watched(request, gone))
        if asked.get("stream"):
            return await self._stream(made, writer, stops, watch)
        try:
            return await self._in_thread(partial(self._whole, made, writer, stops, len(prompt)))
        finally:
            watch.cancel()

    def _whole(
        self, made: Generator[int, None, None], writer: Writer, stops: Collection[int], given: int
    ) -> Response:
        with closing(made):  # a text that ends early gives its row back
            found = list(until(made, stops))
        text = text_of(found, stops) if writer.words == BYTES else ""
        usage = {"prompt_tokens": given, "completion_tokens": len(found)}
        usage["total_tokens"] = given + len(found)
        answer = self._completion(text, found, end_of(found[-1], stops))
        return _json(200, {**answer, "usage": usage})

    def _completion(self, text: str, tokens: list[int], why: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "tokens": tokens, "logprobs": None}
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [{**choice, "finish_reason": why}],
        }

    async def _stream(
        self,
        made: Generator[int, None, None],
        writer: Writer,
        stops: Collection[int],
        watch: asyncio.Task[None],
    ) -> Response:
        """Send an event for each token, and one that says why it ends.

        Errors before the first one have a status. One in the middle ends the connection: that the
        answer has no end says that it is not whole.
        """
        try:
            first = await self._in_thread(partial(next, made))
        except BaseException:
            watch.cancel()
            raise
        events = self._events(chain((first,), made), first, writer, stops)

        async def sent() -> AsyncIterator[bytes]:
            try:
                while event := await self._in_thread(partial(next, events, b"")):
                    yield event
            finally:
                watch.cancel()
                with anyio.CancelScope(shield=True):
                    await self._in_thread(made.close)

        return StreamingResponse(sent(), media_type="text/event-stream")

    def _events(
        self, tokens: Iterator[int], first: int, writer: Writer, stops: Collection[int]
    ) -> Iterator[bytes]:
        decoder, last = codecs.getincrementaldecoder("utf-8")("replace"), first
        for last in until(tokens, stops):
            shown = writer.words == BYTES and last not in stops
            yield self._event(decoder.decode(bytes([last])) if shown else "", [last], None)
        yield self._event(decoder.decode(b"", final=True), [], end_of(last, stops))
        yield b"data: [DONE]\n\n"

    def _event(self, text: str, tokens: list[int], why: str | None) -> bytes:
        return f"data: {json.dumps(self._completion(text, tokens, why))}\n\n".encode()


async def _watched(request: HttpRequest, gone: threading.Event) -> None:
    """Set an event when the client has closed its end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _drain(request: HttpRequest) -> None:
    """Read a body that nobody wants, up to a limit."""
    read = 0
    async for piece in request.stream():
        read += len(piece)
        if read > DRAINED_BYTES:
            return


def _json(status: int, content: object) -> Response:
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        return _refusal(
            422,
            "the outputs have NaN or infinity, which JSON lacks: ask for safetensors",
            code="BX3121",
        )
    return Response(text, status, media_type="application/json")


def _refusal(
    status: int, what: str, *, code: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    content = json.dumps({"error": {"message": what, "code": code}})
    return Response(content, status, headers, media_type="application/json")
