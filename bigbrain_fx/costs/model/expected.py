"""Seconds of single ops by the estimator `analytical`, which regressions correct.

An op is written as a graph of it alone, the reverse of `profiles.signature`. The graph, too, lacks
what a signature leaves out: names, and which of several readers add up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

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
    dense_strides,
)
from bigbrain_fx.costs.model.features import ComputePlace, OpWork, Phase, has_chance
from bigbrain_fx.costs.profiles import TensorArg
from bigbrain_fx.planning import estimator

LEAST_S = 1e-6  # what took less was not measured, but the clock

_OUTPUT = re.compile(r"(\w+)\[([\d, ]*)\]")
_ATTENTION = "scaled_dot_product_attention"
_HERE = "device"


def graph_of(work: OpWork) -> Graph:
    """Return a graph of one op with this signature; its result is the loss, if it wants one."""
    inputs: list[Input] = []
    params: list[Param] = []
    args: list[Arg] = []
    for i, tensor in enumerate(work.signature.tensors):
        if tensor.is_parameter:
            params.append(Param(f"p{i}", _spec(tensor), f"p{i}"))
            args.append(ParamRef(f"p{i}"))
        else:
            inputs.append(Input(f"x{i}", (f"x{i}",), _spec(tensor)))
            args.append(Ref(f"x{i}"))
    op = _op(work, args)
    return Graph("one op", (op,), tuple(inputs), tuple(params), (op.name,), op.name)


def _op(work: OpWork, args: list[Arg]) -> Op:
    signed = work.signature
    moved = work.reads_bytes + work.writes_bytes
    bases = [arg.value for arg in args if isinstance(arg, Ref)]
    may_draw = "dropout" in work.family or work.family == _ATTENTION
    return Op(
        name="op",
        target=signed.target,
        args=(*args, *(("tanh",) if '"tanh"' in signed.literals else ())),
        outputs=tuple(_output(text, signed.wants_backward) for text in signed.outputs),
        is_tuple=len(signed.outputs) > 1,
        random=may_draw and has_chance(signed),
        view_of=bases[0] if bases and moved == 0 and signed.outputs else None,
        flops=work.flops,
        reads_bytes=work.reads_bytes,
        writes_bytes=work.writes_bytes,
    )


def _spec(tensor: TensorArg) -> TensorSpec:
    return TensorSpec(tensor.shape, tensor.dtype, dense_strides(tensor.shape), tensor.wants_grad)


def _output(text: str, wants_grad: bool) -> TensorSpec:
    found = _OUTPUT.fullmatch(text)
    assert found is not None, f"expected float32[8, 512], found {text}"
    shape = tuple(int(size) for size in found[2].split(",") if size.strip())
    graded = wants_grad and found[1].startswith(("float", "bfloat", "complex"))
    return TensorSpec(shape, found[1], dense_strides(shape), graded)


def device_of(place: ComputePlace) -> Device:
    """Return a device with the rates of a machine that was profiled, or a device without a name."""
    if isinstance(place, Device):
        return replace(place, name=_HERE, host="localhost", memory_bytes=2**40)
    return Device(
        name=_HERE,
        host="localhost",
        kind="cuda" if place.kind == "cuda" else "cpu",
        memory_bytes=2**40,
        flops_per_s=place.flops_per_s,
        memory_bytes_per_s=place.memory_bytes_per_s,
        launch_s=place.launch_s,
        threads=place.threads,
    )


def expected_s(work: OpWork, place: ComputePlace) -> Mapping[Phase, float]:
    """Return the seconds of each phase of an op alone; at least what a clock can tell."""
    return _expected_s(work, device_of(place))


@lru_cache(maxsize=8192)
def _expected_s(work: OpWork, device: Device) -> Mapping[Phase, float]:
    found = estimated("analytical", device, work)
    return {phase: max(LEAST_S, seconds) for phase, seconds in found.items()}


def estimated(name: str, place: ComputePlace, work: OpWork) -> dict[Phase, float]:
    """Return what an estimator says of each phase of an op, in seconds."""
    cluster = Cluster((device_of(place),), Link(0.0, 1e9))
    cost: OpCost = estimator(name).estimate(graph_of(work), cluster).op_cost("op", _HERE)
    return {
        "forward": cost.forward_s,
        "backward_input": cost.backward_input_s,
        "backward_weight": cost.backward_s - cost.backward_input_s,
    }
