"""Requests over HTTP: inputs by name, prompts, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from bigbrain_fx.errors import InputError
from bigbrain_fx.serving.cached import CachedText
from bigbrain_fx.serving.crew import SlotSpec
from bigbrain_fx.serving.generation import BYTES, WholeText
from bigbrain_fx.serving.rows import Raw, RawTensor, kind_of, of_json

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


def inputs_of(given: object, spec: SlotSpec) -> Raw:
    """Return the inputs of a request, by name."""
    if not isinstance(given, Mapping) or set(given) != set(spec.inputs):
        found = ", ".join(map(str, given)) if isinstance(given, Mapping) else "none"
        raise InputError(f"expected inputs {', '.join(spec.inputs)}, found {found}", code="BX3122")
    return {name: _input(name, given[name], spec) for name in spec.inputs}


def _input(name: str, content: object, spec: SlotSpec) -> RawTensor:
    dtype, shape = spec.inputs[name]
    kind = kind_of(dtype)
    raw = content if isinstance(content, RawTensor) else of_json(name, content, kind, shape)
    is_whole = name in spec.whole
    fits = raw.shape == shape if is_whole else raw.shape[1:] == shape[1:] and raw.shape
    if raw.kind != kind or not fits:
        rows = "" if is_whole else ", of any number of rows"
        raise InputError(
            f"input {name!r} is {raw.kind}{list(raw.shape)}, expected {kind}{list(shape)}{rows}",
            code="BX3123",
        )
    return raw


def rows_of(tensors: Raw, spec: SlotSpec) -> int:
    """Return how many rows a request has."""
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


def object_of(body: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}", code="BX3126") from error
    if not isinstance(found, dict):
        raise InputError("expected a JSON object", code="BX3127")
    return found


def require_known(asked: Mapping[str, Any]) -> None:
    """Refuse what would be answered otherwise than it was asked."""
    unknown = sorted(set(asked) - set(_KNOWN))
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is not known here: {', '.join(_KNOWN)} are", code="BX3128"
        )
    if asked.get("n", 1) != 1:
        raise InputError("one text is generated at a time: n is 1", code="BX3129")


def stops_of(asked: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens at which a text ends."""
    given = asked.get("stop_token_ids", [])
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise InputError(
            f"expected stop_token_ids to be a list of tokens, found {given!r}", code="BX3130"
        )
    return frozenset(given)


def until(tokens: Iterator[int], stops: Collection[int]) -> Iterator[int]:
    """Yield tokens up to one that ends the text, that one included."""
    for token in tokens:
        yield token
        if token in stops:
            return


def text_of(tokens: Sequence[int], stops: Collection[int]) -> str:
    """Return the text of tokens that are bytes."""
    return bytes(token for token in tokens if token not in stops).decode("utf-8", "replace")


def end_of(last: int, stops: Collection[int]) -> str:
    """Return why a text ends."""
    return "stop" if last in stops else "length"


def prompt_of(given: object, writer: Writer) -> list[int]:
    """Return the tokens of a prompt."""
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
