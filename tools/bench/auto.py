"""How long `auto` plans: stacked transformers of 500, 2,000 and 10,000 ops, GPTs of 175 B and 1 T.

    python -m tools.bench auto [--ops 500,2000,10000] [--effort normal] [--json]
    python -m tools.bench auto --ops 2000 --on unlike:256  or a100s:1024; else 4 equal CPU devices
    python -m tools.bench auto --gpt 175b [--json]        captures it on meta: minutes
    python -m tools.bench auto --gpt 1t --tensor 8        the same, 128 blocks on 3,072 devices

Seconds are of the process's own processor time, estimates and all, without capture; with --gpt
capture is told apart. The gap is to the bound that a search gives. 175 B: 96 blocks, 64 devices
of the preset a100-80, 8 a host with 300 GB/s between them, 200 Gbit/s between hosts. "unlike":
hosts of 8 A100s, V100s, T4s and A10Gs in turn, 25 GB/s within one and 10 Gbit/s between them.
1 T is Megatron-LM's largest (Narayanan et al., SC'21, table 1), bfloat16, a batch of 3,072.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bigbrain_fx.bundles import source_of
from bigbrain_fx.cluster import parse_cluster
from bigbrain_fx.core import (
    Arg,
    Cluster,
    Dim,
    Graph,
    Input,
    ModuleCall,
    Op,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
)
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.frontend.location import resolved
from bigbrain_fx.plan import Options, Plan, Source, make_plan

WIDTH, TOKENS, HEADS, BATCH = 256, 64, 8, 32
OPS_PER_BLOCK = 20
GPT = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_positions": 2048,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "use_cache": False,
}


@dataclass(frozen=True)
class Size:
    """A GPT, what it is trained on, and the rows of a batch."""

    layers: int
    width: int
    heads: int
    words: int
    devices: int
    batch: int
    dtype: str | None = None

    @property
    def config(self) -> dict[str, object]:
        """The configuration of Hugging Face's GPT-2."""
        return GPT | {
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "vocab_size": self.words,
        }


SIZES = {
    "175b": Size(96, 12288, 96, 50257, devices=64, batch=256),
    "1t": Size(128, 25600, 160, 51200, devices=3072, batch=3072, dtype="bfloat16"),
}


@dataclass(frozen=True)
class Row:
    """One plan: what it took to make, and how good it is known to be.

    Gaps, and the fullest device's memory, are a search's; replicas of one searched plan have none.
    """

    name: str
    ops: int
    effort: str
    capture_s: float
    plan_s: float
    max_rss_bytes: int
    step_s: float
    devices: int
    micro_batches: int
    shape: str
    gap: float | None = None
    most_memory: float | None = None


@click.command()
@click.option("--ops", default="500,2000,10000", show_default=True)
@click.option("--effort", type=click.Choice(["fast", "normal", "high"]), default="normal")
@click.option(
    "--on", default="equal:4", show_default=True, help="equal, unlike or a100s: how many."
)
@click.option("--gpt", type=click.Choice(list(SIZES)), help="Plan a GPT instead.")
@click.option("--tensor", type=int, help="As in `split`; 0: auto.")
@click.option("--replicas", type=int, help="As in `split`; 0: auto.")
@click.option("--json", "as_json", is_flag=True)
def main(
    ops: str,
    effort: str,
    on: str,
    gpt: str | None,
    tensor: int | None,
    replicas: int | None,
    as_json: bool,
) -> None:
    """Print planning time and gap."""
    options = Options("auto", effort=effort, tensor=tensor, replicas=replicas)  # type: ignore[arg-type]
    if gpt is not None:
        _show(_gpt(gpt, options), as_json)
        return
    for count in (int(text) for text in ops.split(",")):
        graph = stacked(max(1, count // OPS_PER_BLOCK))
        _show(_planned("stacked", graph, _cluster(on), Source(""), options, 0.0), as_json)


def _show(row: Row, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(row)))
        return
    click.echo(
        f"{row.name} {row.ops:6d} ops, {row.effort}: captured in {row.capture_s:.1f} s, planned in "
        f"{row.plan_s:.2f} s ({row.max_rss_bytes / 2**30:.2f} GiB); step {row.step_s:.4g} s on "
        f"{row.devices} devices, {row.micro_batches} micro-batches, {row.shape}{_gaps(row)}"
    )


def _gaps(row: Row) -> str:
    if row.gap is None or row.most_memory is None:
        return ""
    return f", fullest {row.most_memory:.0%}; gap {row.gap:.1%} to any plan"


def _shape(plan: Plan) -> str:
    """Say how many replicas, stages of one, members of a group, and what is divided."""
    stages = plan.stages
    each = len(stages.devices) // stages.replicas // stages.members
    return f"{stages.replicas} x {each} x {stages.members}, ZeRO {stages.zero_stage}"


def _planned(
    name: str, graph: Graph, cluster: Cluster, source: Source, options: Options, capture_s: float
) -> Row:
    start_s = time.process_time()
    plan = make_plan(graph, cluster, source, options)
    took_s = time.process_time() - start_s
    found = plan.search
    known = (*found.gaps, found.winner.memory_share) if found is not None else ()
    return Row(
        name,
        len(graph.ops),
        options.effort,
        capture_s,
        took_s,
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        plan.forecast.step_s,
        len(plan.stages.devices),
        plan.micro_batches,
        _shape(plan),
        *known,
    )


def _gpt(name: str, options: Options) -> Row:
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(size.config))
        model = resolved(f"hf:{config}", batch=size.batch, seq=2048, dtype=size.dtype)[1]
        with capture_file(model, time_limit_s=600, meta=True) as session:
            graph, source, capture_s = session.graph, source_of(session.facts), session.capture_s
    return _planned(f"gpt-{name}", graph, a100s(size.devices), source, options, capture_s)


def _cluster(on: str) -> Cluster:
    kind, _, count = on.partition(":")
    return {"equal": equal_devices, "unlike": unlike_gpus, "a100s": a100s}[kind](int(count))


def unlike_gpus(count: int) -> Cluster:
    """Describe GPUs of four kinds, a host of each kind in turn."""
    kinds = ("a100-80", "v100-32", "t4", "a10g")
    return _gpus(count, kinds, ("1.25GB/s", "20us"), ("25GB/s", "5us"))


def a100s(count: int) -> Cluster:
    """Describe A100s, 8 a host."""
    return _gpus(count, ("a100-80",), ("25GB/s", "5us"), ("300GB/s", "3us"))


def _gpus(
    count: int, presets: Sequence[str], between: tuple[str, str], within: tuple[str, str]
) -> Cluster:
    """Describe hosts of 8 GPUs each, by bandwidth and latency between hosts and within one."""
    hosts = [(f"h{i // 8}", presets[i // 8 % len(presets)]) for i in range(count)]
    devices = [
        {"name": f"g{i}", "kind": "cuda", "preset": preset, "host": host}
        for i, (host, preset) in enumerate(hosts)
    ]
    links = {"default": _link(*between), "same_host": _link(*within)}
    return parse_cluster(json.dumps({"devices": devices, "links": links}), "cluster.json")


def _link(bandwidth: str, latency: str) -> dict[str, str]:
    return {"bandwidth": bandwidth, "latency": latency}


def equal_devices(count: int) -> Cluster:
    """Describe equal CPU devices."""
    return parse_cluster(json.dumps(equal_file(count)), "cluster.json")


def equal_file(count: int) -> dict[str, object]:
    """Return the cluster file of equal CPU devices."""
    rates = {"memory": "4GiB", "flops": "60GFLOP/s", "memory_bandwidth": "12GB/s", "threads": 1}
    devices = [{"name": f"d{i}", "kind": "cpu", "host": "a", **rates} for i in range(count)]
    return {"devices": devices, "links": {"default": _link("1GB/s", "50us")}}


def stacked(blocks: int) -> Graph:
    """Stack transformer blocks of 20 ops, as a capture would give them."""
    stack = _Stack([], [])
    value = "x"
    for number in range(blocks):
        value = stack.block(number, value)
    total = TensorSpec((), "float32", (), requires_grad=True)
    moved = f"{4 * TOKENS * WIDTH}*B"
    calls = (ModuleCall("", "Stack"),)
    stack.ops.append(
        Op(
            "loss",
            "aten.sum.default",
            (Ref(value),),
            outputs=(total,),
            modules=calls,
            reads_bytes=moved,
        )
    )
    entry = Input("x", ("x",), _spec((TOKENS, WIDTH), grad=False))
    ops, params = tuple(stack.ops), tuple(stack.params)
    return Graph("stacked", ops, (entry,), params, (), "loss", batch=BATCH)


def _spec(shape: tuple[int, ...], grad: bool = True) -> TensorSpec:
    strides = [1]
    for size in reversed(shape):
        strides.append(strides[-1] * size)
    return TensorSpec(("B", *shape), "float32", tuple(reversed(strides)), grad)


@dataclass
class _Stack:
    """The ops and parameters made so far."""

    ops: list[Op]
    params: list[Param]

    def block(self, number: int, value: str) -> str:
        """Add one block and return its result."""
        x, layer = Ref(value), _Layer(self, number)
        normed = layer.add("ln1", "layer_norm", (x, (WIDTH,), layer.weight("ln1", WIDTH)))
        heads = [self._head(layer, name, normed) for name in ("q", "k", "v")]
        mixed = layer.add(
            "mix", "scaled_dot_product_attention", tuple(heads), flops=4 * TOKENS * TOKENS * WIDTH
        )
        merged = layer.add("merge", "transpose", (mixed, 1, 2), view_of=mixed.value)
        flat = layer.add("flat", "reshape", (merged, (TOKENS, WIDTH)))
        first = layer.add("sum1", "add", (x, layer.linear("proj", flat, WIDTH, WIDTH)))
        normed = layer.add("ln2", "layer_norm", (first, (WIDTH,), layer.weight("ln2", WIDTH)))
        wide = layer.linear("up", normed, WIDTH, 4 * WIDTH)
        bent = layer.add("gelu", "gelu", (wide,), (TOKENS, 4 * WIDTH))
        return layer.add("sum2", "add", (first, layer.linear("down", bent, 4 * WIDTH, WIDTH))).value

    def _head(self, layer: _Layer, name: str, value: Ref) -> Ref:
        made = layer.linear(name, value, WIDTH, WIDTH)
        seen = layer.add(f"{name}_view", "view", (made, (TOKENS, HEADS, -1)), view_of=made.value)
        return layer.add(f"{name}_turn", "transpose", (seen, 1, 2), view_of=made.value)


@dataclass(frozen=True)
class _Layer:
    """One block under construction."""

    stack: _Stack
    number: int

    def weight(self, name: str, *shape: int) -> ParamRef:
        path = f"blocks.{self.number}.{name}.weight"
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        self.stack.params.append(
            Param(path, TensorSpec(shape, "float32", strides, requires_grad=True), path)
        )
        return ParamRef(path)

    def linear(self, name: str, value: Ref, width: int, out: int) -> Ref:
        weight = self.weight(name, out, width)
        return self.add(
            name, "linear", (value, weight), (TOKENS, out), flops=2 * TOKENS * width * out
        )

    def add(
        self,
        name: str,
        target: str,
        args: tuple[Arg, ...],
        shape: tuple[int, ...] = (TOKENS, WIDTH),
        flops: int = 0,
        view_of: str | None = None,
    ) -> Ref:
        moved: Dim = f"{4 * shape[0] * shape[1]}*B"
        op = Op(
            f"b{self.number}_{name}",
            f"aten.{target}.default",
            args,
            outputs=(_spec(shape),),
            modules=(ModuleCall("", "Stack"), ModuleCall(f"blocks.{self.number}", "Block")),
            flops=f"{flops}*B" if flops else 0,
            reads_bytes=moved,
            writes_bytes=0 if view_of else moved,
            view_of=view_of,
        )
        self.stack.ops.append(op)
        return Ref(op.name)


if __name__ == "__main__":
    main()
