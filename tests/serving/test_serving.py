"""`serve`: a real client's session, against one process that runs the same slots."""

from __future__ import annotations

import http.client
import importlib
import json
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigbrain_fx
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options
from bigbrain_fx.serving import ServeOptions, Serving, served
from bigbrain_fx.serving.crew import SlotSpec
from bigbrain_fx.serving.engine import Engine, QueueFullError, Request
from bigbrain_fx.serving.rows import RawTensor, decode, encode, joined, of_json, taken
from tests.support.command_line import call, write_cluster

DEADLINE_S = 400.0  # of every call: a busy machine takes long to start processes
LENGTH, ROWS, WORDS = 6, 4, 256


class Sums(nn.Module):
    """Scores of the next token, from all before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).cumsum(1)
        return self.head(x + torch.tanh(self.mix(x)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    example = {"tokens": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    options = Options("naive", mode="eval", micro_batches=2)
    devices = write_cluster(folder)
    bigbrain_fx.split(Sums(), devices, folder / "bundle", options, example_batch=example)
    return folder / "bundle"


@pytest.fixture(scope="module")
def serving(bundle: Path) -> Iterator[Serving]:
    with served(bundle, ServeOptions(port=0, token="secret", deadline_s=DEADLINE_S)) as found:
        yield found


def asked(
    serving: Serving, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Ask as a client does; return status, JSON (or bytes) and headers."""
    host = serving.url.removeprefix("http://")
    client = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        client.request(method, path, content, {"Authorization": "Bearer secret", **headers})
        answer = client.getresponse()
        text = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text, answer.headers
    finally:
        client.close()


def one_process(bundle: Path, slot: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return what `infer` of the bundle gives for a slot's rows, in this process."""
    sys.path.insert(0, str(bundle.parent))
    try:
        infer = importlib.import_module("bundle.infer").infer
    finally:
        sys.path.remove(str(bundle.parent))
    output: torch.Tensor = infer({"tokens": torch.tensor(slot)})["output"]
    return output


def test_a_session(serving: Serving, bundle: Path) -> None:
    """Eight clients at once, rows of one to three: bit for bit what one process gives."""
    rows = [[[n, k, 3, 4, 5, 6] for k in range(1 + n % 3)] for n in range(8)]
    found: list[Any] = [None] * len(rows)

    def client(n: int) -> None:
        found[n] = asked(serving, "POST", "/infer", {"inputs": {"tokens": rows[n]}})

    threads = [threading.Thread(target=client, args=(n,), daemon=True) for n in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    slots: dict[int, dict[int, list[int]]] = {}
    for (status, answer, _), own in zip(found, rows, strict=True):
        assert status == 200
        start, end = answer["rows"]
        assert end - start == len(own)
        slots.setdefault(answer["slot"], {}).update(dict(zip(range(start, end), own, strict=True)))
    for (_, answer, _), own in zip(found, rows, strict=True):
        members = slots[answer["slot"]]
        assert sorted(members) == list(range(len(members)))
        whole = one_process(bundle, [members[n] for n in sorted(members)])
        start, end = answer["rows"]
        assert torch.equal(torch.tensor(answer["outputs"]["output"]), whole[start:end])
        assert len(own) == end - start
    _, health, _ = asked(serving, "GET", "/health")
    assert health["requests"] >= len(rows)
    assert health["status"] == "ok"


def test_tensors_as_bytes(serving: Serving, bundle: Path) -> None:
    raw = of_json("tokens", [[1, 2, 3, 4, 5, 6]], "I64", (ROWS, LENGTH))
    kind = "application/octet-stream"
    body = encode({"tokens": raw})
    status, content, headers = asked(serving, "POST", "/infer", body, **{"Content-Type": kind})
    assert status == 200
    output = decode(content)["output"]
    assert output.shape == (1, LENGTH, WORDS)
    assert headers["X-Rows"] == "0-1"
    assert torch.equal(torch.tensor(output.values()), one_process(bundle, [[1, 2, 3, 4, 5, 6]]))


def test_text_is_greedy_at_once_and_as_a_stream(serving: Serving, bundle: Path) -> None:
    known = [7, 8]
    for _ in range(4):
        scores = one_process(bundle, [known + [0] * (LENGTH - len(known))])
        known.append(int(scores[0, len(known) - 1].argmax()))
    ask = {"prompt": [7, 8], "max_tokens": 4}
    status, answer, _ = asked(serving, "POST", "/v1/completions", ask)
    assert status == 200
    assert answer["choices"][0]["tokens"] == known[2:]
    assert answer["usage"]["total_tokens"] == 6
    _, events, _ = asked(serving, "POST", "/v1/completions", {**ask, "stream": True})
    lines = [line for line in events.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    told = [json.loads(line.removeprefix("data: "))["choices"][0]["tokens"] for line in lines[:-1]]
    assert [token for tokens in told for token in tokens] == known[2:]


def test_text_is_drawn_by_the_seed_and_ends_at_a_token(serving: Serving) -> None:
    ask = {"prompt": [7, 8], "max_tokens": 4, "temperature": 5.0, "seed": 3}
    drawn = [asked(serving, "POST", "/v1/completions", ask)[1]["choices"][0] for _ in range(2)]
    assert drawn[0] == drawn[1]
    other = asked(serving, "POST", "/v1/completions", {**ask, "seed": 4})[1]["choices"][0]
    assert other["tokens"] != drawn[0]["tokens"]
    *_, stop, _ = tokens = drawn[0]["tokens"]
    end = {**ask, "stop_token_ids": [stop]}
    ended = asked(serving, "POST", "/v1/completions", end)[1]["choices"][0]
    assert ended["tokens"] == tokens[: tokens.index(stop) + 1]
    assert (drawn[0]["finish_reason"], ended["finish_reason"]) == ("length", "stop")
    _, events, _ = asked(serving, "POST", "/v1/completions", {**end, "stream": True})
    *_, last, done = (line for line in events.decode().split("\n\n") if line)
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/infer", b"x" * 100_000, 413, "bytes"),
        ("/infer", {"inputs": {"tokens": [[1] * LENGTH] * 5}}, 413, "a slot has 4"),
        ("/infer", {"inputs": {"tokens": [[1] * 7]}}, 400, "expected lists of 6, found 7"),
        ("/infer", {"inputs": {"tokens": [["a"] * LENGTH]}}, 400, "expected a number"),
        ("/infer", {"inputs": {"tokens": [[0.5] * LENGTH]}}, 400, "are not"),
        ("/infer", {"inputs": {"words": []}}, 400, "expected inputs tokens, found words"),
        ("/infer", {"inputs": {"tokens": []}}, 400, "one number of rows"),
        ("/infer", b"{", 400, "no JSON"),
        ("/nothing", {}, 404, "nothing at /nothing"),
        ("/v1/completions", {"prompt": [1] * 6, "max_tokens": 2}, 400, "together 7 at most"),
        ("/v1/completions", {"prompt": [256]}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": [256], "max_tokens": 1}, 400, "no token 256"),
        ("/v1/completions", {"prompt": [1], "temperature": -1}, 400, "expected temperature"),
        ("/v1/completions", {"prompt": [1], "top_p": 0}, 400, "expected top_p"),
        ("/v1/completions", {"prompt": [1], "n": 2}, 400, "one text"),
        ("/v1/completions", {"prompt": [1], "stop_token_ids": 3}, 400, "a list of tokens"),
        ("/v1/completions", {"prompt": [1], "stop": "x"}, 400, "'stop' is not known"),
    ],
)
def test_bad_requests(serving: Serving, path: str, body: object, status: int, says: str) -> None:
    found, answer, _ = asked(serving, "POST", path, body)
    assert (found, says in answer["error"]["message"]) == (status, True), answer


def test_a_token_is_asked_for(serving: Serving) -> None:
    status, _, headers = asked(serving, "GET", "/health", Authorization="Bearer other")
    assert status == 401
    assert headers["WWW-Authenticate"] == "Bearer"


def test_a_port_in_use_and_a_host_without_a_token(serving: Serving, bundle: Path) -> None:
    port = serving.url.rpartition(":")[2]
    taken_port = call("serve", bundle, "--port", port)
    assert taken_port.code == 2
    assert f"port {port} is in use" in taken_port.err
    open_host = call("serve", bundle, "--host", "0.0.0.0", "--port", "0")
    assert open_host.code == 2
    assert "a token is needed beyond loopback" in open_host.err
    with pytest.raises(InputError, match="cannot read"), served(bundle / "nothing"):
        pass


class Centred(Sums):
    """Scores less their mean over the rows of a batch."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = super().forward(tokens)
        return scores - scores.mean(0)


def test_rows_that_go_by_each_other(tmp_path: Path) -> None:
    """Requests share batches, so such a bundle is not served; it runs on whole batches alone."""
    example = {"tokens": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)}
    devices, out = write_cluster(tmp_path), tmp_path / "centred"
    made = Centred()
    bigbrain_fx.split(made, devices, out, Options(mode="eval"), example_batch=example)
    with pytest.raises(InputError, match="requests share batches"), served(out):
        pass
    sys.path.insert(0, str(tmp_path))
    try:
        infer = importlib.import_module("centred.infer").infer
    finally:
        sys.path.remove(str(tmp_path))
    with torch.no_grad():
        assert torch.equal(infer(example)["output"], made.eval()(example["tokens"]))
    with pytest.raises(ValueError, match="whole batches of 4 rows, found 3 rows"):
        infer({"tokens": example["tokens"][:3]})
    rows = tmp_path / "rows.safetensors"
    save_file({"tokens": example["tokens"][:3]}, rows)
    words = ["run", str(out), "--inputs", str(rows), "--outputs", str(tmp_path / "outputs")]
    found = call(*words)
    assert found.code == 2
    assert "give so many rows" in found.err
    assert not (tmp_path / "outputs").exists()


def test_a_client_that_leaves_is_not_computed(serving: Serving) -> None:
    before = serving.engine.counted.left
    row = of_json("tokens", [[1] * LENGTH], "I64", (ROWS, LENGTH))
    gone = Request({"tokens": row}, 1, is_gone=lambda: True)
    serving.engine.ask(gone)
    assert gone.done.wait(DEADLINE_S)
    assert gone.error == "the client has gone"
    assert serving.engine.counted.left == before + 1


def test_a_stream_that_nobody_reads_ends(serving: Serving) -> None:
    """The client closes its end after the first event: what it asked for is not gone on with."""
    host = serving.url.removeprefix("http://")
    client = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    ask = json.dumps({"prompt": [1], "max_tokens": LENGTH, "stream": True})
    client.request("POST", "/v1/completions", ask, {"Authorization": "Bearer secret"})
    answer = client.getresponse()
    assert answer.readline().strip()
    answer.close()
    client.close()
    status, found, _ = asked(serving, "POST", "/infer", {"inputs": {"tokens": [[1] * LENGTH]}})
    assert status == 200
    assert found["rows"][1] - found["rows"][0] == 1


@pytest.mark.nightly
def test_processes_that_die_are_started_again(serving: Serving) -> None:
    engine = serving.engine
    before = engine.counted.restarts
    engine.processes["d0"].kill()
    with engine._moved:
        assert engine._moved.wait_for(lambda: engine.counted.restarts > before, DEADLINE_S)
    status, _, _ = asked(serving, "POST", "/infer", {"inputs": {"tokens": [[1] * LENGTH]}})
    assert status == 200


# --------------------------------------------------------------------------- without processes


class _Held(Engine):
    """An engine whose devices never take a slot."""

    def __init__(self, limit: int) -> None:
        self.limit, self.slot_s, self.ended, self._closing = limit, 2.5, None, False
        self._moved = threading.Condition()
        self._waiting, self._under_way = deque(), deque()
        self.spec = SlotSpec({}, (), {}, ROWS)


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = _Held(limit=2)
    row = RawTensor("I64", (1, 1), bytes(8))
    for _ in range(2):
        engine.ask(Request({"tokens": row}, 1))
    with pytest.raises(QueueFullError) as full:
        engine.ask(Request({"tokens": row}, 1))
    assert full.value.retry_s == 5  # two slots of 2.5 s


def test_rows_are_cut_and_joined_along_any_dimension() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(2, 4, 3)
    raw = RawTensor("F32", (2, 4, 3), whole.numpy().tobytes())
    part = taken(raw, 1, 1, 2)
    assert torch.equal(torch.tensor(part.values()), whole[:, 1:3])
    both = joined([{"x": taken(raw, 0, 0, 1)}, {"x": taken(raw, 0, 1, 1)}])["x"]
    assert both == raw
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    bits = half.view(torch.int16).numpy().tobytes()
    assert RawTensor("BF16", (2,), bits).values() == [1.5, -2.0]


def test_bodies_that_are_no_safetensors() -> None:
    for content in (b"", b"{}", (2).to_bytes(8, "little") + b"[]", b"\xff" * 20):
        with pytest.raises(InputError, match="no safetensors"):
            decode(content)
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    with pytest.raises(InputError, match="bytes for the shape"):
        decode(len(header).to_bytes(8, "little") + header + bytes(4))
