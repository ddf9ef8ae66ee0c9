"""Profiles made by a formula, and models fitted to them: for tests that measure nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.costs.fit import Row, fit
from bigbrain_fx.costs.model import OpWork, PlaceRates, write_model
from bigbrain_fx.costs.profiles import Machine, OpProfile, ProfileStore, Signature, TensorArg

CPU = Machine("cpu", "Some CPU", "2.13", 1, 1e9, 1e9, 1e-6)
GPU = replace(CPU, kind="cuda", processor="Some GPU", flops_per_s=5e10, memory_bytes_per_s=5e10)


def linear_op(rows: int, wide: int, deep: int, grad: bool = True) -> OpProfile:
    """x [rows, wide] times a weight [deep, wide]; its times are left open."""
    x = TensorArg((rows, wide), "float32", wants_grad=grad)
    w = TensorArg((deep, wide), "float32", wants_grad=grad, is_parameter=True)
    out = (f"float32[{rows}, {deep}]",)
    signed = Signature("aten.linear.default", (x, w), "(%, %)", out)
    moved = 4 * (rows * wide + wide * deep)
    return OpProfile(signed, 0.0, flops=2 * rows * wide * deep, reads_bytes=moved,
                     writes_bytes=4 * rows * deep)  # fmt: skip


def pointwise_op(name: str, rows: int, wide: int) -> OpProfile:
    """One pass over x [rows, wide]."""
    x = TensorArg((rows, wide), "float32", wants_grad=True)
    signed = Signature(f"aten.{name}.default", (x,), "(%)", (f"float32[{rows}, {wide}]",))
    nbytes = 4 * rows * wide
    return OpProfile(signed, 0.0, flops=rows * wide, reads_bytes=nbytes, writes_bytes=nbytes)


def timed(machine: Machine, bare: OpProfile, noise: float = 1.0) -> OpProfile:
    """Fill in times: half of the roofline's speed, backward as dear as forward."""
    work = OpWork(bare.signature, bare.flops, bare.reads_bytes, bare.writes_bytes)
    forward_s = 2.0 * work.roofline_s(PlaceRates.of(machine)) * noise
    tensors = bare.signature.tensors
    has_weight = any(t.wants_grad and t.is_parameter for t in tensors)
    return replace(
        bare,
        forward_s=forward_s,
        backward_input_s=forward_s if bare.signature.wants_backward else 0.0,
        backward_weight_s=1.5 * forward_s if has_weight else 0.0,
    )


def rows(seed: int = 0, machines: Sequence[Machine] = (CPU, GPU), noise: float = 0.05) -> list[Row]:
    """Draw profiles of products and passes on every machine, a few percent apart from a formula."""
    dice = random.Random(seed)
    sizes = (1, 4, 16, 64, 256)
    ops = [linear_op(dice.choice(sizes), dice.choice(sizes), n) for n in range(8, 328, 8)]
    ops += [
        pointwise_op(name, n, dice.choice(sizes))
        for name in ("relu", "gelu", "mul")
        for n in (2, 8, 32, 128, 512, 2048, 8192)
    ]
    return [
        (machine, timed(machine, op, 1.0 + noise * (2 * dice.random() - 1)))
        for machine in machines
        for op in ops
    ]


def database(path: Path, seed: int = 0) -> Path:
    """Write such profiles as `bigbrain-fx profile` would."""
    store = ProfileStore(path)
    made = rows(seed)
    for machine in (CPU, GPU):
        store.put(machine, *(profile for where, profile in made if where == machine))
    return path


def costs_file(path: Path, kind: str = "boosting") -> Path:
    """Fit a model to such profiles, and write it."""
    write_model(fit(rows(), kind), path)
    return path
