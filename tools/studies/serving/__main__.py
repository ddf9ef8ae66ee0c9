"""A bundle behind HTTP, asked by one client and by eight: slots, processor time, the same bits.

    python -m tools.studies.serving --write results.md

The GPT that ships, on two and three devices of this host, each asked by real HTTP clients. Counts
and processor seconds of the devices' processes; clocks of a busy machine say nothing. Every answer
is held against `infer` of the bundle, in this process, over the slots that the answers name.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import bigbrain_fx
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.frontend import load_model_file
from bigbrain_fx.plan import Options
from bigbrain_fx.serving import ServeOptions, Serving, served
from tools.studies.emulation import missing
from tools.studies.serving.emulated import ROUNDS, SHARE, SpeedRow, emulated_rows

MODEL = Path(__file__).resolve().parents[3] / "models" / "gpt.py"
ROWS, LENGTH = 16, 64  # of its example batch
PLACES = 16  # rows of keys and values
REQUESTS, TOKENS, CLIENTS = 24, 6, (1, 8)
DEADLINE_S = 300.0
SPEED_TOKENS = 8
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ServedRow:
    """One kind of question to one bundle, by so many clients at once."""

    devices: int
    cache: bool
    what: str
    clients: int
    answers: int
    slots: int
    processor_s: Mapping[str, float]
    equal: int  # answers that have the bits of one process

    def __str__(self) -> str:
        each = sum(self.processor_s.values()) / self.answers
        shares = " ".join(f"{s / sum(self.processor_s.values()):.0%}" for s in self._of_devices())
        cells = (
            self.devices,
            "yes" if self.cache else "no",
            self.what,
            self.clients,
            self.answers,
            self.slots,
            f"{self.answers / self.slots:.1f}",
            f"{1000 * each:.0f}",
            shares,
            f"{self.equal} of {self.answers}",
        )
        return f"| {' | '.join(map(str, cells))} |"

    def _of_devices(self) -> Iterable[float]:
        return self.processor_s.values()


def ask(serving: Serving, path: str, content: object) -> dict[str, Any]:
    """Ask as a client does, on a connection of its own."""
    host = serving.url.removeprefix("http://")
    client = http.client.HTTPConnection(host, timeout=DEADLINE_S)
    try:
        client.request("POST", path, json.dumps(content))
        answer = client.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        assert answer.status == 200, found
        return found
    finally:
        client.close()


def prompts() -> list[list[int]]:
    """Return rows of real text: this file, piece by piece."""
    text = Path(__file__).read_bytes()
    return [list(text[n * LENGTH : (n + 1) * LENGTH]) for n in range(REQUESTS)]


def processor_s(serving: Serving) -> dict[str, float]:
    """Return the seconds that each device's process has computed, all its threads."""
    found = {}
    for name, process in serving.engine.processes.items():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


def rows_of(
    serving: Serving,
    devices: int,
    infer: Any,  # noqa: ANN401  # a bundle's
    cache: bool,
) -> list[ServedRow]:
    """Ask for scores, then for text, by one client and by eight."""
    found = []
    asked = [(f"{TOKENS} tokens", _eager_text)] if cache else _QUESTIONS
    for clients in CLIENTS:
        for what, run in asked:
            before, slots = processor_s(serving), serving.engine.counted.slots
            with ThreadPoolExecutor(clients) as pool:
                answers, equal = run(serving, pool, infer)
            took = {n: s - before[n] for n, s in processor_s(serving).items()}
            used = serving.engine.counted.slots - slots
            row = ServedRow(devices, cache, what, clients, answers, used, took, equal)
            click.echo(str(row))
            found.append(row)
    return found


def _scores(serving: Serving, pool: ThreadPoolExecutor, infer: Any) -> tuple[int, int]:  # noqa: ANN401
    asked = prompts()
    answers = list(
        pool.map(lambda row: ask(serving, "/infer", {"inputs": {"tokens": [row]}}), asked)
    )
    slots: dict[int, dict[int, list[int]]] = {}
    for row, answer in zip(asked, answers, strict=True):
        slots.setdefault(answer["slot"], {})[answer["rows"][0]] = row
    one = {n: _one_process(infer, [rows[k] for k in sorted(rows)]) for n, rows in slots.items()}
    equal = [
        torch.equal(torch.tensor(a["outputs"]["output"][0]), one[a["slot"]][a["rows"][0]])
        for a in answers
    ]
    return len(answers), sum(equal)


def _text(serving: Serving, pool: ThreadPoolExecutor, infer: Any) -> tuple[int, int]:  # noqa: ANN401
    return _generated(serving, pool, partial(_greedy, infer))


def _eager_text(serving: Serving, pool: ThreadPoolExecutor, _: Any) -> tuple[int, int]:  # noqa: ANN401
    return _generated(serving, pool, partial(_eager, load_model_file(MODEL).model.eval()))


_QUESTIONS = (("scores of a row", _scores), (f"{TOKENS} tokens", _text))


def _generated(
    serving: Serving, pool: ThreadPoolExecutor, judge: Callable[[Sequence[int]], list[int]]
) -> tuple[int, int]:
    asked = [row[: LENGTH // 2] for row in prompts()[:8]]
    bodies = [{"prompt": row, "max_tokens": TOKENS} for row in asked]
    answers = list(pool.map(lambda body: ask(serving, "/v1/completions", body), bodies))
    equal = sum(
        judge(row) == answer["choices"][0]["tokens"]
        for row, answer in zip(asked, answers, strict=True)
    )
    return len(answers) * TOKENS, equal * TOKENS


def _greedy(infer: Any, prompt: Sequence[int]) -> list[int]:  # noqa: ANN401
    known = list(prompt)
    for _ in range(TOKENS):
        scores = _one_process(infer, [known + [0] * (LENGTH - len(known))])
        known.append(int(scores[0, len(known) - 1].argmax()))
    return known[len(prompt) :]


def _eager(model: nn.Module, prompt: Sequence[int]) -> list[int]:
    """Generate with the model as it is, whole rows in plain PyTorch."""
    known = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            known.append(int(model(torch.tensor([known]))[0, -1].argmax()))
    return known[len(prompt) :]


def _one_process(infer: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:  # noqa: ANN401
    output: torch.Tensor = infer({"tokens": torch.tensor(rows)})["output"]
    return output


def measured(devices: int, cache: bool, scratch: Path) -> list[ServedRow]:
    """Split the GPT over so many devices, serve it and ask."""
    unlike = (2, 1, 1)[:devices]
    cluster = Cluster(
        tuple(
            Device(f"d{n}", "localhost", "cpu", 2**32, 1e10 * s, 1e10 * s)
            for n, s in enumerate(unlike)
        ),
        Link(5e-5, 1e9),
    )
    name = f"gpt_{devices}_{cache}"
    micros = 1 if cache else 2  # a batch of single positions is too small to part
    options = Options("naive", mode="eval", micro_batches=micros, cache=PLACES if cache else 0)
    bigbrain_fx.split(MODEL, cluster, scratch / name, options)
    infer = importlib.import_module(f"{name}.infer").infer
    with served(scratch / name, ServeOptions(port=0)) as serving:
        return rows_of(serving, devices, infer, cache)


def speeds(scratch: Path) -> list[SpeedRow]:
    """Measure seconds on unlike emulated devices, where that can be done."""
    if reason := missing():
        click.echo(f"no seconds: {reason}", err=True)
        return []
    found = []
    asked = [row[: LENGTH // 2] for row in prompts()[:8]]
    for row in emulated_rows(MODEL, PLACES, ask, asked, SPEED_TOKENS, scratch):
        click.echo(str(row))
        found.append(row)
    return found


def _on_emulated(rows: Sequence[SpeedRow]) -> list[str]:
    if not rows:
        return []
    return [
        "## Tokens a second on unlike devices\n",
        f"Emulated devices (`studies/emulation`: {SHARE:g} of a core for speed 2, links of 1 "
        f"Gbit/s and 1 ms), the model cut evenly; eight prompts of {LENGTH // 2}",
        f"tokens, {SPEED_TOKENS} tokens each; medians of {ROUNDS} rounds (least, most), seconds "
        "from request to whole answer.\n",
        "| devices, speeds | cache | clients | tokens/s | answer, s: median | nine of ten |",
        "|---|---|---:|---:|---:|---:|",
        *map(str, rows),
        "",
        "Cut evenly, a device of half the speed sets the pace: so small a model is served faster "
        "by one process. Devices are for",
        "models that one of them does not hold.\n",
    ]


ANSWERS = """\
## What it answers

- `POST /infer`: JSON, or safetensors as `application/octet-stream` (then `X-Slot`, `X-Rows`); up
  to a slot's rows.
- `POST /v1/completions` (`prompt` as tokens, or text for a model of 256 words; `max_tokens`,
  `stop_token_ids`, `stream`): the likeliest token each time, or with `temperature` above 0 drawn
  among the `top_k` and `top_p` likeliest; the same `seed` gives the same text. It is for models
  that take rows of tokens, where a try at the start shows that scores do not depend on later
  tokens. Of a bundle split without `--cache` each token is computed from all before it again, so
  a token costs a whole row.
- With `split --cache ROWS` a token costs one position. A text holds a row of the caches, on each
  device those of its layers; more texts than rows wait (`--queue`). A prompt is read as many
  positions a slot as a slot has, several slots under way, in the same form that generates: it
  costs its positions, in full slots. Texts share slots at unlike positions. `/infer` is refused:
  rows are the server's to give. Processes that die take their caches along: texts under way end.
- `GET /health`, `GET /v1/models`.

400: other inputs, with what was expected; 401: no token (`--token-file`, needed beyond loopback);
413: a body or a number of rows that no slot takes; 503 with Retry-After: `--queue` requests wait
already, a device's process has died (then all are started again, and those in its slots are
told), or scores are not all numbers. A client that has gone before its slot starts is left out; a
stream ends when nobody reads it. A token that the model has no embedding for ends its process as
any error of the model does. A model that draws at inference draws by the slot's number."""


def page(found: Sequence[ServedRow], emulated: Sequence[SpeedRow] = ()) -> str:
    """Return the page."""
    ratios = [
        f"{_each(one) / _each(many):.1f}"
        for one in found
        for many in found
        if (one.devices, one.cache, one.what) == (many.devices, many.cache, many.what)
        and one.clients < many.clients
    ]
    return "\n".join(
        [
            "# A bundle behind HTTP\n",
            "Written by `python -m tools.studies.serving --write results.md`; do not edit.\n",
            "```",
            "bigbrain-fx split model.py --mode eval --devices cluster.json --out served",
            "bigbrain-fx serve served --port 8000   # split with --cache 16: keeps keys and values",
            'curl localhost:8000/infer -d \'{"inputs": {"tokens": [[1, 2, ...]]}}\'',
            "```\n",
            "Requests share slots: each is the bundle's own batch, of a fixed shape, filled up "
            "with its last row. A slot starts",
            "when a device can take it, with whoever waits; nobody is waited for, and one slot "
            "more than there are devices is",
            "under way, so that each device has the next one there. An answer names its slot and "
            "rows, and has the bits that",
            "`infer` of the bundle gives for the same slot in one process: the last column.\n",
            "| devices | cache | asked for | clients at once | answers | slots | answers a slot | "
            "processor ms an answer | of it on each device | same bits (tokens) |",
            "|---:|---|---|---:|---:|---:|---:|---:|---|---:|",
            *map(str, found),
            "",
            f"{MODEL.stem}.py, prompts of {LENGTH // 2} tokens. Without a cache: slots of {ROWS} "
            f"rows of {LENGTH} tokens in two micro-batches; text",
            "is compared with slots of one row. With a cache: slots of "
            f"{ROWS} positions of any rows, {PLACES} rows are kept; text is compared with greedy",
            "decoding of the untouched model, whole rows in eager PyTorch. A token with the cache "
            f"takes {_with_cache(found)} of the",
            "processor time without, the prompt's reading included. Eight clients take "
            f"{', '.join(ratios)}",
            "times less processor time an answer than one (rows in this order).\n",
            *_on_emulated(emulated),
            ANSWERS,
            "",
        ]
    )


def _with_cache(found: Sequence[ServedRow]) -> str:
    """Say what a token costs with a cache, as shares of what it costs without."""
    text = [row for row in found if row.what.endswith("tokens")]
    shares = [
        f"{_each(kept) / _each(again):.2f}"
        for again in text
        for kept in text
        if (again.devices, again.clients) == (kept.devices, kept.clients)
        and kept.cache
        and not again.cache
    ]
    return ", ".join(shares)


def _each(row: ServedRow) -> float:
    return sum(row.processor_s.values()) / row.answers


@click.command()
@click.option("--write", type=click.Path(path_type=Path), help="The page.")
def main(write: Path | None) -> None:
    """Serve, ask, compare; print the page, or write it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="serving-") as scratch:
        sys.path.insert(0, scratch)
        found = [
            row
            for devices in (2, 3)
            for cache in (False, True)
            for row in measured(devices, cache, Path(scratch))
        ]
        seconds = speeds(Path(scratch))
    text = page(found, seconds)
    if write is None:
        click.echo(text)
    else:
        write.write_text(text)


if __name__ == "__main__":
    main()
