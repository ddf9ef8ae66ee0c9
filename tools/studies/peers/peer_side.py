"""One process of `bench_peer.py` or `bench_shards.py`: a rank of ours or of theirs.

It trains when told to: a line of JSON on stdin, a line of JSON back on stdout. Between commands it
waits without using the processor, so that two sides can take turns. It knows no statistics.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch does not export them
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tools.studies.peers import peer_model
from tools.studies.peers.tensor_peak import TensorPeak

MICRO_BATCHES = 8
WHOLE = "whole.safetensors"  # beside a bundle's parts of weights: what its model began with
SCHEDULES: Mapping[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "zb-v": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for: `side` is one of those in `main`."""

    side: str
    bundle: Path
    rank: int
    world: int
    port: int
    schedule: str
    deadline_s: float
    tensors: bool = False  # whether to say, when asked, what they took at their most


class Side(Protocol):
    """Something that trains by steps."""

    def step(self) -> float | None:
        """Train one step; return the loss where it is made."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step, by the names of the model."""
        ...


class Ours:
    """A device of the bundle, on the bundle's own runtime, as its train.py would start it."""

    def __init__(self, wanted: Wanted) -> None:
        sys.path.insert(0, str(wanted.bundle))
        train = importlib.import_module("train")
        runtime = importlib.import_module("runtime.train")
        runtime.keep_freed_memory()
        store = _join(wanted)
        bundle, where = train.BUNDLE, torch.device("cpu")
        ranks = {cls.name: rank for rank, cls in enumerate(bundle.devices)}
        transport = runtime.NetworkTransport(ranks, where, wanted.deadline_s, store)
        self.device = runtime.make_device(bundle, wanted.rank, transport, bundle.seed, where)
        self.number = 0
        self.first: dict[str, Tensor] = {}

    def step(self) -> float | None:
        """Train one step."""
        loss = self.device.run_step(self.number)
        if self.number == 0:
            self.first = {name: g.clone() for name, g in self.device.first_gradients.items()}
        self.number += 1
        return None if loss is None else float(loss)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step."""
        return self.first


class Part(nn.Module):
    """Some blocks, with what comes before the first and after the last, under the model's names."""

    def __init__(self, whole: peer_model.GPT, blocks: range) -> None:
        super().__init__()
        if blocks.start == 0:
            self.embed, self.position = whole.embed, whole.position
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in blocks})
        if blocks.stop == len(whole.blocks):
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after these blocks, logits after the last; tokens go into the first."""
        if hasattr(self, "embed"):
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def parts_of(whole: peer_model.GPT, rank: int, world: int, schedule: str) -> dict[int, Part]:
    """Return a rank's stages by number, all of as many blocks: a V gives each rank two of them."""
    count = 2 * world if schedule == "zb-v" else world
    each = len(whole.blocks) // count
    mine = sorted({rank, count - 1 - rank}) if schedule == "zb-v" else [rank]
    return {number: Part(whole, range(number * each, (number + 1) * each)) for number in mine}


class Theirs:
    """torch.distributed.pipelining: hand-split modules, the bundle's weights, equal cuts."""

    def __init__(self, wanted: Wanted) -> None:
        _join(wanted)
        parts = parts_of(_model(wanted.bundle), wanted.rank, wanted.world, wanted.schedule)
        where, count = torch.device("cpu"), len(parts) * wanted.world
        stages = [PipelineStage(part, n, count, where) for n, part in parts.items()]
        several: Any = stages if wanted.schedule == "zb-v" else stages[0]
        self.schedule = SCHEDULES[wanted.schedule](several, MICRO_BATCHES, loss_fn=_loss)
        self.module = nn.ModuleList(parts.values())
        self.optimizer = peer_model.optimizer(self._named().items())
        self.batches = peer_model.batches(0)
        self.first_of_all, self.last_of_all = 0 in parts, count - 1 in parts
        self.first: dict[str, Tensor] = {}

    def step(self) -> float | None:
        """Train one step."""
        batch = next(self.batches)
        losses: list[Tensor] = []
        fed = (batch["tokens"],) if self.first_of_all else ()
        held: dict[str, Any] = {"target": batch["targets"], "losses": losses}
        self.schedule.step(*fed, **(held if self.last_of_all else {}), return_outputs=False)
        self.first = self.first or self._gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if losses else None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step."""
        return self.first

    def _named(self) -> dict[str, nn.Parameter]:
        return {name: p for part in self.module for name, p in part.named_parameters()}

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self._named().items() if p.grad is not None}


class Eager:
    """The unsplit module in one process, in the loop that anyone would write."""

    def __init__(self, wanted: Wanted) -> None:
        self.module = _model(wanted.bundle)
        self.optimizer = peer_model.optimizer(self.module.named_parameters())
        self.batches = peer_model.batches(0)
        self.first: dict[str, Tensor] = {}

    def step(self) -> float | None:
        """Train one step."""
        batch = next(self.batches)
        parts = (batch[name].chunk(MICRO_BATCHES) for name in ("tokens", "targets"))
        losses = []
        for tokens, targets in zip(*parts, strict=True):
            loss = _loss(self.module(tokens), targets)
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        self.first = self.first or _gradients(self.module)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).mean())

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step."""
        return self.first


class Replicated:
    """The whole model on every rank, its own rows of every batch, by torch's data parallelism."""

    def __init__(self, wanted: Wanted) -> None:
        _join(wanted)
        self.rank, self.world = wanted.rank, wanted.world
        self.module = self.wrapped(_model(wanted.bundle))
        self.optimizer = self.made([*self.module.parameters()])
        self.batches = peer_model.batches(0)
        self.first: dict[str, Tensor] = {}

    def wrapped(self, whole: nn.Module) -> nn.Module:
        """Return the model as its ranks share it."""
        return DistributedDataParallel(whole)

    def made(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return peer_model.optimizer([("", parameter) for parameter in parameters])

    def step(self) -> float | None:
        """Train one step on this rank's rows."""
        batch = next(self.batches)
        tokens, targets = (batch[n].chunk(self.world)[self.rank] for n in ("tokens", "targets"))
        loss = _loss(self.module(tokens), targets)
        loss.backward()
        self.first = self.first or self.whole(_gradients(self.module))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def whole(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by the names of the model."""
        return {name.removeprefix("module."): gradient for name, gradient in found.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the first step."""
        return self.first


class ZeroOne(Replicated):
    """DistributedDataParallel whose optimizer's state is divided."""

    def made(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-4)


class FullyShard(Replicated):
    """FSDP2 block by block, whose weights stay between forward and backward: ZeRO 2."""

    def wrapped(self, whole: nn.Module) -> nn.Module:
        """Return the model as its ranks share it."""
        mesh = init_device_mesh("cpu", (self.world,))
        assert isinstance(whole, peer_model.GPT)
        for block in whole.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(whole, mesh=mesh, reshard_after_forward=False)
        return whole

    def whole(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by the names of the model: gathered."""
        return {name: cast(DTensor, part).full_tensor() for name, part in found.items()}


class LocalAttention(nn.Module):
    """The attention of a rank's own heads, over its parts of both layers: as torchtitan has it."""

    def __init__(self, whole: peer_model.Attention, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = whole.qkv, whole.out, heads

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions: (batch, sequence, dim) to the same shape."""
        rows, length, dim = x.shape
        width = dim // peer_model.HEADS
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class TensorParallel(Replicated):
    """DTensor's styles as PyTorch's tutorial puts them on a GPT, words and loss included."""

    def wrapped(self, whole: nn.Module) -> nn.Module:
        """Return the model of which each rank computes its part."""
        assert isinstance(whole, peer_model.GPT)
        mesh = init_device_mesh("cpu", (self.world,))
        self.order = _by_rank(self.world)
        plan: dict[str, ParallelStyle] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for number, block in enumerate(whole.blocks):
            assert isinstance(block, peer_model.Block)
            with torch.no_grad():
                for tensor in (block.attention.qkv.weight, block.attention.qkv.bias):
                    tensor.copy_(tensor[self.order])  # so that each rank's rows are its heads'
            local = LocalAttention(block.attention, peer_model.HEADS // self.world)
            block.attention = local  # type: ignore[assignment]  # it has the same layers
            for wide in ("attention.qkv", "up"):
                plan[f"blocks.{number}.{wide}"] = ColwiseParallel()
            for narrow in ("attention.out", "down"):
                plan[f"blocks.{number}.{narrow}"] = RowwiseParallel()
        return parallelize_module(whole, mesh, plan)

    def step(self) -> float | None:
        """Train one step on all rows."""
        batch = next(self.batches)
        with loss_parallel():
            loss = _loss(self.module(batch["tokens"]), batch["targets"])
            loss.backward()
        self.first = self.first or self.whole(_gradients(self.module))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(cast(DTensor, loss.detach()).full_tensor())

    def whole(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by the names of the model, in its order of rows."""
        made = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
        back = torch.argsort(self.order)
        return {n: g[back] if ".qkv." in n else g for n, g in made.items()}


def _by_rank(world: int) -> Tensor:
    """Return the rows of a fused qkv layer, those of each rank's heads together."""
    rows = torch.arange(3 * peer_model.DIM)
    return rows.view(3, world, -1).transpose(0, 1).reshape(-1)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _model(bundle: Path) -> peer_model.GPT:
    whole, joined = peer_model.GPT(), bundle / WHOLE
    tensors: dict[str, Tensor] = {}
    for path in (
        [joined] if joined.is_file() else sorted((bundle / "weights").glob("*.safetensors"))
    ):
        tensors |= load_file(path)
    whole.load_state_dict(tensors)
    whole.train()
    return whole


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def _join(wanted: Wanted) -> Store:
    timeout = timedelta(seconds=wanted.deadline_s)
    store = TCPStore("127.0.0.1", wanted.port, wanted.world, wanted.rank == 0, timeout)
    dist.init_process_group(
        "gloo", store=store, rank=wanted.rank, world_size=wanted.world, timeout=timeout
    )
    return store


# --------------------------------------------------------------------------- commands


def main() -> None:
    """Set up as asked on the command line, then obey stdin until it ends."""
    asked = json.loads(sys.argv[1])
    wanted = Wanted(**{**asked, "bundle": Path(asked["bundle"])})
    torch.set_num_threads(1)
    sides: dict[str, Callable[[Wanted], Side]] = {
        "ours": Ours,
        "theirs": Theirs,
        "eager": Eager,
        "DDP": Replicated,
        "ZeroRedundancyOptimizer": ZeroOne,
        "FSDP2": FullyShard,
        "DTensor": TensorParallel,
    }
    meter = TensorPeak() if wanted.tensors else None
    side = sides[wanted.side](wanted)
    _reply({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "tensors":
            assert meter is not None
            _reply({"peak_bytes": meter.read()})
        else:
            _reply(_obey(side, command))


def _obey(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "gradients":
        save_file({n: g.contiguous() for n, g in side.gradients().items()}, command["path"])
        return {"written": command["path"]}
    times, loss = [], None
    cpu = time.process_time()
    for _ in range(command["count"]):
        start = time.perf_counter()
        loss = side.step()
        times.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step_s": times, "cpu_s": cpu, "loss": loss, "max_rss_bytes": peak}


def _reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
