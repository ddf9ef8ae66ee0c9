"""`split --mode eval --kv-cache`: a bundle that generates one position a step."""

from __future__ import annotations

import http.client
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbrain_fx
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import with_cache
from bigbrain_fx.plan import Options, read_plan
from bigbrain_fx.serving import ServeOptions, Serving, served
from bigbrain_fx.serving.cached import CachedText, filling
from bigbrain_fx.serving.crew import ServingCrew, SlotSpec
from bigbrain_fx.serving.engine import Counted, Engine, QueueFullError, Request
from bigbrain_fx.serving.rows import RawTensor, decode, joined
from tests.support.command_line import write_cluster

DEADLINE_S = 400.0  # of every call: a busy machine takes long to start processes
LENGTH, ROWS, WORDS, DIM, PLACES = 12, 4, 256, 8, 6


class Attention(nn.Module):
    """Causal, in one head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class Small(nn.Module):
    """Scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


EXAMPLE = {"tokens": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caching")
    options = Options("naive", mode="eval", micro_batches=2, cache=PLACES)
    devices = write_cluster(folder)
    bigbrain_fx.split(Small(), devices, folder / "caching", options, example_batch=EXAMPLE)
    return folder / "caching"


@pytest.fixture
def infer(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Tensor]]:
    monkeypatch.setattr(sys, "path", [str(bundle.parent), *sys.path])
    found: Callable[..., dict[str, Tensor]] = importlib.import_module("caching.infer").infer
    return found


def test_a_bundle_has_the_bits_of_one_process(infer: Callable[..., dict[str, Tensor]]) -> None:
    """Rows at unlike positions, a prompt of several positions in one batch, a row used again."""
    one, _ = with_cache(Small(), EXAMPLE, PLACES)
    batches = [
        ([5, 6, 7, 8], [0, 0, 0, 1], [0, 1, 2, 0]),
        ([9, 9, 1, 2], [0, 1, 5, 5], [3, 1, 0, 1]),
        ([3, 4, 5, 6], [0, 1, 5, 5], [0, 2, 2, 3]),
    ]
    for tokens, rows, positions in batches:
        given = torch.tensor(tokens)[:, None], torch.tensor(rows), torch.tensor(positions)
        found = infer(dict(zip(("tokens", "row", "position"), given, strict=True)))["output"]
        with torch.no_grad():
            halves = [one(*(part[m : m + 2] for part in given)) for m in (0, 2)]
        assert torch.equal(found, torch.cat(halves))


def test_caches_stand_in_the_plan_and_in_the_text(bundle: Path) -> None:
    """One row more than asked for, on the device that makes them; counted as its memory."""
    plan = read_plan(bundle)
    names = [f"layers.{n}.qkv.{kind}" for n in (0, 1) for kind in ("weight", "bias")]
    caches = [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("keys", "values")]
    assert set(names + caches) <= set(plan.graph.param)
    assert plan.graph.param["layers.0.keys"].spec.shape == (PLACES + 1, LENGTH, DIM)
    assert plan.source.cache == PLACES
    text = "".join(path.read_text() for path in bundle.glob("*.py"))
    assert "self.keys.index_put_((row, position), " in text
    for device in plan.stages.devices:
        names = [name for stage in plan.stages.of(device) for name in stage.params]
        held = sum(plan.graph.param[name].spec.nbytes for name in names)
        assert plan.forecast.of(device).peak_bytes >= held


# --------------------------------------------------------------------------- text


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """Return what plain eager PyTorch generates: the whole row for each token."""
    model, known = Small().eval(), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            known.append(int(model(torch.tensor([known]))[0, -1].argmax()))
    return known[len(prompt) :]


class _Here:
    """An engine of one process, which answers at once."""

    depth, limit = 3, 1

    def __init__(
        self, infer: Callable[..., dict[str, Tensor]], rows: int = ROWS, places: int = PLACES
    ) -> None:
        self.infer, self.counted = infer, Counted()
        self.spec = SlotSpec({}, (), {}, rows)
        self.filling = filling(places)

    def ask(self, request: Request) -> None:
        whole = joined([request.tensors, *[self.filling] * (self.spec.rows - request.rows)])
        found = self.infer({name: torch.tensor(raw.values()) for name, raw in whole.items()})
        ((name, scores),) = found.items()
        kept = scores[: request.rows].contiguous()
        request.outputs = {name: RawTensor("F32", tuple(kept.shape), kept.numpy().tobytes())}
        request.done.set()


def test_text_is_that_of_eager_torch(infer: Callable[..., dict[str, Tensor]]) -> None:
    """A prompt longer than a slot; two texts in turns; a row that had another text before."""
    writer = CachedText(cast("Engine", _Here(infer)), PLACES, LENGTH, DEADLINE_S)
    assert (writer.words, writer.output) == (WORDS, "output")
    for prompts in ([[7, 8, 9, 10, 11, 12], [200]], [[1], [5, 6, 7]]):
        texts = [writer.tokens(prompt, 6, Request({}, 0)) for prompt in prompts]
        found = list(zip(*texts, strict=True))
        assert [list(row) for row in zip(*found, strict=True)] == [greedy(p, 6) for p in prompts]


def test_rows_are_given_back_and_who_waits_for_one_is_counted(
    infer: Callable[..., dict[str, Tensor]],
) -> None:
    writer = CachedText(cast("Engine", _Here(infer)), 1, LENGTH, 0.01)
    first = writer.tokens([1], 3, Request({}, 0))
    next(first)
    writer._waiting = 1  # as many as may
    with pytest.raises(QueueFullError):
        next(writer.tokens([2], 1, Request({}, 0)))
    writer._waiting = 0
    first.close()  # its client has gone
    assert list(writer.tokens([2], 1, Request({}, 0))) == greedy([2], 1)
    with pytest.raises(InputError, match=f"together {LENGTH + 1} at most"):
        next(writer.tokens([1] * LENGTH, 2, Request({}, 0)))


def asked(serving: Serving, path: str, body: object) -> tuple[int, Any]:
    client = http.client.HTTPConnection(serving.url.removeprefix("http://"), timeout=DEADLINE_S)
    try:
        client.request("POST", path, json.dumps(body).encode())
        answer = client.getresponse()
        text = answer.read()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text.decode()
    finally:
        client.close()


@pytest.mark.nightly
def test_eight_clients_have_the_bits_of_one_process_that_runs_the_same_slots(
    bundle: Path, infer: Callable[..., dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More texts than rows, at once and as streams; then processes die, and the caches are new."""
    frames: list[tuple[str, bytes]] = []
    send, receive = ServingCrew.send, ServingCrew.receive

    def sent(crew: ServingCrew, frame: bytes) -> None:
        frames.append(("in", frame))
        send(crew, frame)

    def received(crew: ServingCrew) -> bytes | None:
        content = receive(crew)
        frames.append(("out", content or b""))
        return content

    monkeypatch.setattr(ServingCrew, "send", sent)
    monkeypatch.setattr(ServingCrew, "receive", received)
    prompts = [[n, *range(n)] for n in range(1, 9)]
    with served(bundle, ServeOptions(port=0, deadline_s=DEADLINE_S)) as serving:
        assert serving.generates
        bodies = [{"prompt": p, "max_tokens": 4, "stream": p[0] > 4} for p in prompts]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: asked(serving, "/v1/completions", body), bodies))
        found = [_told(answer) for _, answer in answers]
        assert found == [greedy(prompt, 4) for prompt in prompts]
        _same_slots(
            [f for f in frames if f[0] == "in"], [f for f in frames if f[0] == "out"], infer
        )
        status, answer = asked(serving, "/infer", {"inputs": {}})
        assert (status, "keeps keys and values" in answer["error"]["message"]) == (400, True)
        _text_ends_where_processes_die(serving)


def _text_ends_where_processes_die(serving: Serving) -> None:
    engine = serving.engine
    text = CachedText(engine, PLACES, LENGTH, DEADLINE_S).tokens([1, 2], 8, Request({}, 0))
    next(text)
    engine.processes["d0"].kill()
    with engine._moved:
        assert engine._moved.wait_for(lambda: engine.counted.restarts > 0, DEADLINE_S)
    with pytest.raises(Exception, match="what it had read of this"):
        next(text)
    _, again = asked(serving, "/v1/completions", {"prompt": [1, 2], "max_tokens": 3})
    assert _told(again) == greedy([1, 2], 3)


def _told(answer: Any) -> list[int]:  # JSON, or events
    if not isinstance(answer, str):
        tokens: list[int] = answer["choices"][0]["tokens"]
        return tokens
    lines = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [token for line in lines for token in json.loads(line)["choices"][0]["tokens"]]


def _same_slots(
    given: Sequence[tuple[str, bytes]],
    got: Sequence[tuple[str, bytes]],
    infer: Callable[..., dict[str, Tensor]],
) -> None:
    """Run every slot again in one process, in order."""
    outputs = [content for _, content in got[1:]]  # the first one says what there is
    assert len(outputs) == len(given) > 8
    for (_, slot), content in zip(given, outputs, strict=True):
        batch = {name: torch.tensor(raw.values()) for name, raw in decode(slot).items()}
        assert len(batch["row"]) == ROWS
        expected = decode(content)["output"]
        assert infer(batch)["output"].numpy().tobytes() == expected.data


@pytest.mark.nightly
def test_gpt2_of_transformers_by_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untouched, from its configuration; the tokens are those of its own class in eager torch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16,
        n_head=2,
        n_layer=2,
        n_positions=16,
        vocab_size=61,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "saved")
    options = Options("naive", mode="eval", micro_batches=1, cache=2)
    where = f"hf:{tmp_path / 'saved' / 'config.json'}"
    devices = write_cluster(tmp_path)
    bigbrain_fx.split(where, devices, tmp_path / "gpt2", options, weights=tmp_path / "saved")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "gpt2", raising=False)
    here = _Here(importlib.import_module("gpt2.infer").infer, rows=8, places=2)
    source = read_plan(tmp_path / "gpt2").source
    writer = CachedText(cast("Engine", here), source.cache, source.positions, DEADLINE_S)
    known = [3, 1, 4, 1, 5]
    with torch.no_grad():
        for _ in range(3):
            known.append(int(theirs(torch.tensor([known])).logits[0, -1].argmax()))
    assert list(writer.tokens(known[:5], 3, Request({}, 0))) == known[5:]
