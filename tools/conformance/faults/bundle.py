"""The bundle that faults strike: a GPT with dropout, a tied weight, clipping, on four devices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import bigbrain_fx
from bigbrain_fx.core import Cluster, Device, DeviceStore, Link
from bigbrain_fx.plan import Options, read_plan

MODEL = '''"""Names the next letter: a small GPT; embedding and head share their weight."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BLOCKS, HEADS, WORDS, LENGTH, ROWS = {width}, {blocks}, 4, {words}, {length}, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.mix(self.before(x)).view(batch, length, 3 * HEADS, width // HEADS)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, letters):
        places = torch.arange(letters.size(1), device=letters.device)
        x = self.drop(self.words(letters) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    return GPT()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def batches(seed):
    for step in itertools.count():
        dice = torch.Generator().manual_seed(1000 * seed + step)
        rows = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=dice)
        yield {{"letters": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}}


def example_batch():
    return next(batches(0))


clip_norm = 0.5
'''
TIE = "        self.head.weight = self.words.weight\n"
CLIP = "clip_norm = 0.5\n"


@dataclass(frozen=True)
class Size:
    """Of the model: `words` in its vocabulary, `length` of a row."""

    width: int = 32
    blocks: int = 4
    words: int = 64
    length: int = 16


SMALL = Size()


@dataclass(frozen=True)
class Fault:
    """A fault and its place: before the `nth` call of an instruction in a step of a device.

    Attributes:
        device, step: whose, and in which step; for "ready", "addressed" and "giving" the
            first generation that will do, for "commit" and "before_record" the step of the commit.
        at: an instruction (forward, backward, send, recv, ...), or "any" of them, or a `send` of
            one kind (send_gradient); or begin, end, in_update, updated, snapshot, commit,
            before_record, ready, addressed, giving.
        what: kill, stop, stop_others, kill_parent, end_run (SIGTERM to the supervisor), raise,
            sleep, run, corrupt, nan, wrong (a `send` sends 1.5 times what it has), or mark (it is
            only noted).
        generation: not in an older one.
        after: the number of a fault that must have struck before.
        spares: so many spares must be warm before it strikes.
        spares_s: after so many seconds it strikes all the same; 0: then the run fails.
        others: devices that are struck in the same moment.
        seconds, words: of sleep, and of run.
    """

    device: str
    step: int
    at: str
    nth: int = 0
    what: str = "kill"
    generation: int = 0
    after: int | None = None
    spares: int = 0
    spares_s: float = 0.0
    others: tuple[str, ...] = ()
    seconds: float = 0.0
    words: tuple[str, ...] = ()


PIPELINE = Options("naive", schedule="1f1b", micro_batches=4)
BUNDLES = {
    "1f1b": PIPELINE,
    **{
        name: replace(PIPELINE, schedule=name)
        for name in ("gpipe", "list", "zb-h1", "interleaved", "zb-v", "auto", "gems")
    },
    "dualpipe-v": replace(PIPELINE, schedule="dualpipe-v", micro_batches=8),
    "recompute": replace(PIPELINE, recompute="all"),
    "offload": replace(PIPELINE, offload=("activations", "state")),
    "weights": replace(PIPELINE, schedule="gpipe", offload=("weights",)),
    "2bw": replace(PIPELINE, asynchronous="2bw"),
    "stash": replace(PIPELINE, asynchronous="stash"),
    "zero1": replace(PIPELINE, replicas=2, zero_stage=1, sum_order="tree"),
    "tensor": replace(PIPELINE, tensor=2),
}
"""What may be struck, by name. Steps that overlap have neither clipping nor a tied weight."""


def _stores(folder: Path, devices: int) -> tuple[DeviceStore, ...]:
    """Return stores that take no time: what saves little time in moving stays in memory."""
    names = (f"d{i}" for i in range(devices))
    return tuple(DeviceStore(f"disk-{n}", n, 2**30, 1e15, str(folder)) for n in names)


def make_bundle(
    folder: Path,
    size: Size = SMALL,
    devices: int = 4,
    options: Options = PIPELINE,
    kind: Literal["cpu", "cuda"] = "cpu",
) -> Path:
    """Write the model and split it into `folder/bundle`, by itself a pipeline of equal devices."""
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL.format(**asdict(size))
    if options.asynchronous:
        text = text.replace(TIE, "").replace(CLIP, "")
    (folder / "gpt.py").write_text(text)
    memory_bytes = 4 * 2**30
    made = Cluster(
        tuple(
            Device(f"d{i}", "here", kind, memory_bytes, 1e10, 1e10, 1e-6) for i in range(devices)
        ),
        Link(5e-5, 1e9),
        stores=_stores(folder, devices) if options.offload else (),
    )
    target, extras = folder / "bundle", ("hosts", "suspicion")
    return bigbrain_fx.split(folder / "gpt.py", made, target, options, extras=extras).bundle


def devices_of(bundle: Path) -> tuple[str, ...]:
    """Return the devices of a bundle, by rank."""
    return tuple(read_plan(bundle).stages.devices)


def with_faults(
    bundle: Path, folder: Path, faults: Sequence[Fault], steps: int, block: int = 0
) -> Path:
    """Return a copy of a bundle whose processes do what `faults` say.

    Args:
        bundle: as it was split.
        folder: takes the copy.
        faults: by number.
        steps: of the run; after the last one the hashes of the state are written down.
        block: with it, every so many steps wait until the file `faults/go-N` is there.
    """
    copy = folder / "bundle"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "faults").mkdir()
    planned = {
        "faults": [asdict(fault) for fault in faults],
        "steps": steps,
        "block": block,
        "events": str(folder / "events.jsonl"),
    }
    (copy / "faults" / "planned.json").write_text(json.dumps(planned))
    shutil.copy(Path(__file__).with_name("injected.py"), copy / "faults.py")
    _edit(copy / "train.py")
    return copy


def _edit(program: Path) -> None:
    text, call = program.read_text(), "    main(BUNDLE)"
    if call not in text:
        raise RuntimeError(f"{program} does not call main(BUNDLE): faults cannot be installed")
    program.write_text(
        text.replace(call, f"    import faults\n\n    faults.install(BUNDLE)\n{call}")
    )
