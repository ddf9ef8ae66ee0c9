"""What a split backward costs: processor time of B and W against a whole one, and bytes that wait.

    python -m tools.split_backward [--blocks 4] [--rounds 9] [--json]

One device of the runtime, a Transformer of `--blocks` blocks 512 wide, micro-batches of 128 tokens.
Each round runs both sides in turn, in changing order, in one thread; times are of that thread, so
that others on the machine matter less. `bytes` are those of live tensors after a forward and after
its backward, weights, batch and sums left out. Gradients of both sides must be the same bits.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.live import LiveBytes
from bigbrain_fx.runtime import DeferringDevice, Device, Stage, deferred_layers
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.local import Hub, LocalTransport

WIDTH, HEADS, TOKENS, MICRO_BATCHES = 512, 8, 128, 4


class Block(nn.Module):
    """A Transformer's block, its layers of torch.nn or of the runtime."""

    def __init__(self, of: Any) -> None:  # noqa: ANN401  # a module
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = of.Linear(WIDTH, 3 * WIDTH), of.Linear(WIDTH, WIDTH)
        self.up, self.down = of.Linear(WIDTH, 4 * WIDTH), of.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        split = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


def stage_of(of: Any, blocks: int) -> type[Stage]:  # noqa: ANN401  # a module
    """Return a stage of so many blocks and a loss."""

    class Blocks(Stage):
        returns = ("loss",)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(of) for _ in range(blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    return Blocks


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield one batch again and again."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(MICRO_BATCHES, TOKENS, WIDTH, generator=dice)
    return itertools.repeat({"x": x})


def device_of(split: bool, blocks: int, weights: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Return a device that holds all of the model."""
    base: Any = DeferringDevice if split else Device
    about = {
        "name": "d0",
        "names": ("d0",),
        "micro_batches": MICRO_BATCHES,
        "stages": {0: stage_of(deferred_layers if split else nn, blocks)},
        "loss": (0, "loss"),
        **({"deferring": (0,)} if split else {}),
    }
    stream = Stream(batches, 0, {"x": ("x",)}, (), MICRO_BATCHES, torch.device("cpu"))
    device = type("One", (base,), about)(LocalTransport(Hub()), stream, 0, torch.device("cpu"))
    device.load(weights, dict.fromkeys(weights, "d0"))
    device.stream.advance(0)
    return device


def clock_s() -> float:
    """Return this thread's processor time."""
    return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)


def passes(device: Any, split: bool, micro: int) -> tuple[float, float, float]:  # noqa: ANN401
    """Run one micro-batch; return the seconds of its forward, its backward, and that of weights."""
    x = device.batch("x", micro).requires_grad_()
    start = clock_s()
    device.forward(0, micro, x=x)
    forward = clock_s()
    device.backward(0, micro)
    backward = clock_s()
    if split:
        device.backward_weight(0, micro)
    end = clock_s()
    return forward - start, backward - forward, end - backward


def kept(device: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return the live bytes after a forward, and after its backward."""
    live = LiveBytes()
    live.ignore(device.parameters.values())
    x = device.batch("x", 0).requires_grad_()
    with live:
        device.forward(0, 0, x=x)
        forward = live.now
        device.backward(0, 0)
        after = live.now
    sums = device._now.gradients.values()
    return forward, after - sum(gradient.untyped_storage().nbytes() for gradient in sums)


@click.command()
@click.option("--blocks", default=4, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(blocks: int, rounds: int, as_json: bool) -> None:
    """Measure both sides in paired rounds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = stage_of(nn, blocks)().state_dict()
    sides = {split: device_of(split, blocks, weights) for split in (False, True)}
    ratios, parts = [], []
    for number in range(rounds + 1):  # the first one warms up
        found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for micro in range(MICRO_BATCHES):
            for split in (False, True) if (number + micro) % 2 else (True, False):
                found[split].append(passes(sides[split], split, micro))
        if number:
            each = {s: [statistics.median(t) for t in zip(*found[s], strict=True)] for s in found}
            ratios.append(sum(each[True][1:]) / each[False][1])
            parts.append((*each[True], *each[False][:2]))
    same = all(
        torch.equal(gradient, sides[True]._now.gradients[name])
        for name, gradient in sides[False]._now.gradients.items()
    )
    after_forward, after_backward = kept(device_of(True, blocks, weights))
    f, b, w, plain_f, plain_b = (statistics.median(p) for p in zip(*parts, strict=True))
    result = {
        "same_bits": same,
        "backward_ratio": statistics.median(ratios),
        "forward_ratio": f / plain_f,
        "f_ms": 1e3 * f,
        "b_ms": 1e3 * b,
        "w_ms": 1e3 * w,
        "plain_f_ms": 1e3 * plain_f,
        "plain_b_ms": 1e3 * plain_b,
        "bytes_after_forward": after_forward,
        "bytes_after_backward": after_backward,
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, value in result.items():
        click.echo(f"{name:22}{value:12.3f}" if isinstance(value, float) else f"{name:22}{value}")


if __name__ == "__main__":
    main()
