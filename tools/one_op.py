"""A profile -> a graph of that one op, so that any estimator can be asked about it.

The reverse of `profiles.signature`: what a signature leaves out (names, which of several readers
add up) the graph has not either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bigbrain_fx.core import (
    Arg,
    Cluster,
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
from bigbrain_fx.costs.model import Phase, family
from bigbrain_fx.costs.profiles import Machine, OpProfile, TensorArg
from bigbrain_fx.planning import registry as plugins

_OUTPUT = re.compile(r"(\w+)\[([\d, ]*)\]")
_CHANCE = re.compile(r"(?<![\w.])0\.\d*[1-9]")
_ATTENTION = "scaled_dot_product_attention"


def graph_of(profile: OpProfile) -> Graph:
    """Return a graph of one op with this signature; its result is the loss, if it wants one."""
    inputs: list[Input] = []
    params: list[Param] = []
    args: list[Arg] = []
    for i, tensor in enumerate(profile.signature.tensors):
        if tensor.is_parameter:
            params.append(Param(f"p{i}", _spec(tensor), f"p{i}"))
            args.append(ParamRef(f"p{i}"))
        else:
            inputs.append(Input(f"x{i}", (f"x{i}",), _spec(tensor)))
            args.append(Ref(f"x{i}"))
    op = _op(profile, args)
    return Graph("one op", (op,), tuple(inputs), tuple(params), (op.name,), op.name)


def _op(profile: OpProfile, args: list[Arg]) -> Op:
    signed = profile.signature
    moved = profile.reads_bytes + profile.writes_bytes
    bases = [arg.value for arg in args if isinstance(arg, Ref)]
    chance = any(float(text) > 1e-3 for text in _CHANCE.findall(signed.literals))
    name = family(signed.target)
    return Op(
        name="op",
        target=signed.target,
        args=(*args, *(("tanh",) if '"tanh"' in signed.literals else ())),
        outputs=tuple(_output(text, signed.wants_backward) for text in signed.outputs),
        is_tuple=len(signed.outputs) > 1,
        random=chance and ("dropout" in name or name == _ATTENTION),
        view_of=bases[0] if bases and moved == 0 and signed.outputs else None,
        flops=profile.flops,
        reads_bytes=profile.reads_bytes,
        writes_bytes=profile.writes_bytes,
    )


def _spec(tensor: TensorArg) -> TensorSpec:
    return TensorSpec(tensor.shape, tensor.dtype, _strides(tensor.shape), tensor.wants_grad)


def _output(text: str, wants_grad: bool) -> TensorSpec:
    found = _OUTPUT.fullmatch(text)
    assert found is not None, f"expected float32[8, 512], found {text}"
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    graded = wants_grad and found[1].startswith(("float", "bfloat", "complex"))
    return TensorSpec(shape, found[1], _strides(shape), graded)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def device_of(machine: Machine) -> Device:
    """Return a device with the rates of a machine."""
    return Device(
        name="device",
        host="localhost",
        kind="cuda" if machine.kind == "cuda" else "cpu",
        memory_bytes=2**40,
        flops_per_s=machine.flops_per_s,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        launch_s=machine.launch_s,
        threads=machine.threads,
    )


def estimated(estimator: str, machine: Machine, profile: OpProfile) -> dict[Phase, float]:
    """Return what an estimator says of each phase, in seconds."""
    cluster = Cluster((device_of(machine),), Link(0.0, 1e9))
    cost: OpCost = (
        plugins.estimator(estimator).estimate(graph_of(profile), cluster).op_cost("op", "device")
    )
    return {
        "forward": cost.forward_s,
        "backward_input": cost.backward_input_s,
        "backward_weight": cost.backward_s - cost.backward_input_s,
    }
