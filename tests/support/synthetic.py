"""Small graphs and clusters made by hand, for tests that need no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from bigbrain_fx.core import (
    Arg,
    Cluster,
    Costs,
    Device,
    Graph,
    Input,
    Link,
    Op,
    OpCost,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
)

GIB = 2**30


def tensor(*shape: int, grad: bool = True, dtype: str = "float32") -> TensorSpec:
    strides = tuple(1 for _ in shape)
    return TensorSpec(shape, dtype, strides, grad)


def op(name: str, target: str, *args: Arg, out: TensorSpec | None = None, **more: object) -> Op:
    """Make a call; sizes default to what its output has."""
    spec = out or tensor(4)
    made = Op(
        name, target, tuple(args), outputs=(spec,), flops=spec.numel, writes_bytes=spec.nbytes
    )
    return replace(made, **more)  # type: ignore[arg-type]  # fields of Op by name


def graph_of(ops: Sequence[Op], params: Sequence[Param] = (), rows: int = 4) -> Graph:
    """Make a graph over one input "x"; its loss is the last op."""
    entry = Input("x", ("x",), tensor(rows, 4, grad=False))
    return Graph(
        "toy", tuple(ops), (entry,), tuple(params), (ops[-1].name,), ops[-1].name, batch=rows
    )


def weight(name: str, *shape: int, canonical: str = "") -> Param:
    return Param(name, tensor(*shape), canonical or name)


def device(name: str, speed: float = 1.0, memory_bytes: int = GIB, host: str = "h") -> Device:
    return Device(name, host, "cpu", memory_bytes, 1e9 * speed, 1e9 * speed, 1e-6)


def cluster_of(*devices: Device, link: Link | None = None) -> Cluster:
    return Cluster(devices, link or Link(1e-5, 1e8))


def chain_graph(seed: int, count: int, skips: bool = True, tied: bool = False) -> Graph:
    """Draw `count` linear layers in a row, so that there is one order; some values skip ahead."""
    dice = random.Random(seed)
    ops: list[Op] = []
    params: list[Param] = []
    for i in range(count):
        width = dice.choice((8, 64, 256))
        last = tied and i == count - 1 and count > 1
        params.append(weight(f"w{i}", dice.choice((1, 1000)), canonical="w0" if last else ""))
        if last:
            params[-1] = replace(params[-1], spec=params[0].spec)
        args: list[Arg] = [Ref(ops[-1].name if ops else "x"), ParamRef(f"w{i}")]
        if skips and i > 1 and dice.random() < 0.5:
            args.append(Ref(ops[dice.randrange(i - 1)].name))
        ops.append(op(f"v{i}", "aten.linear.default", *args, out=tensor(4, width)))
    return graph_of(ops, params)


def random_graph(seed: int, count: int) -> Graph:
    """Draw a graph with all that units are made for: branches, ties, tuples, state, masks, dice."""
    dice = random.Random(seed)
    ops: list[Op] = [
        op("mask", "aten.ones.default", out=tensor(4, 4, grad=False), flops=0),
    ]
    params: list[Param] = []
    values = ["x"]
    for i in range(count):
        name = f"v{i}"
        reads = [Ref(value) for value in sorted(dice.sample(values[-6:], min(len(values), 2)))]
        out = tensor(4, dice.choice((4, 32, 128)))
        match dice.randrange(6):
            case 0:
                params.append(weight(f"w{i}", dice.choice((10, 400))))
                ops.append(op(name, "aten.linear.default", reads[0], ParamRef(f"w{i}"), out=out))
            case 1:
                tied = dice.choice(params).name if params else None
                extra = (ParamRef(tied),) if tied else ()
                ops.append(op(name, "aten.linear.default", reads[0], *extra, out=out))
            case 2:
                ops.append(op(f"t{i}", "aten.split.Tensor", reads[0], 2, out=out, is_tuple=True))
                ops.append(
                    op(name, "operator.getitem", Ref(f"t{i}"), 0, out=out, view_of=reads[0].value)
                )
            case 3:
                buffer = f"b{i}"
                params.append(Param(buffer, tensor(7, grad=False), buffer, "buffer"))
                args = (reads[0], ParamRef(buffer))
                ops.append(op(name, "aten.batch_norm.default", *args, out=out, mutates=(buffer,)))
            case 4:
                ops.append(
                    op(name, "aten.dropout.default", reads[0], 0.1, True, out=out, random=True)
                )
            case _:
                ops.append(op(name, "aten.mul.Tensor", *reads, Ref("mask"), out=out))
        values.append(name)
    loose = [value for value in values[1:] if not any(value in other.refs for other in ops)]
    ops.append(op("loss", "aten.sum.default", tuple(Ref(value) for value in loose), out=tensor(1)))
    return graph_of(ops, params)


def random_costs(seed: int, graph: Graph, cluster: Cluster) -> Costs:
    """Draw every cost; unlike devices like different ops."""
    dice = random.Random(seed)

    def cost(entry: Op) -> OpCost:
        forward_s, backward_s = dice.choice((0.0, 0.001, 0.003)), dice.choice((0.001, 0.004))
        saved_bytes, workspace_bytes = dice.randrange(2000), dice.randrange(500)
        if not entry.requires_grad:
            return OpCost(forward_s, workspace_bytes=workspace_bytes)
        return OpCost(forward_s, backward_s, backward_s / 2, saved_bytes, workspace_bytes)

    ops = {d.name: {entry.name: cost(entry) for entry in graph.ops} for d in cluster.devices}
    per_byte_s = {d.name: dice.choice((0.0, 1e-6)) for d in cluster.devices}
    per_tensor_s = {name: 1e-4 if taken_s else 0.0 for name, taken_s in per_byte_s.items()}
    return Costs(ops, cluster, per_byte_s, optimizer_s_per_tensor=per_tensor_s)
