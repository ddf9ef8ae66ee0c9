"""The stages of a chain bundle under torch.distributed.pipelining, for those who train with that.

A PipelineStage talks to its two neighbours only: a value that skips stages is relayed through them.

    bundle     0 ──a──▶ 1 ──b──▶ 2        PipelineStage    0 ──a──▶ 1 ──a,b──▶ 2
               0 ────────a─────▶ 2

This file reads the device classes' channels; it knows no schedule and not our own transport.

    stage = as_pipeline_stage(BUNDLE.devices, rank, torch.device("cpu"))
    stage.submod.stage.load_state_dict(load_file(f"weights/{BUNDLE.devices[rank].name}.safetensors"))
    schedule = Schedule1F1B(stage, 8, loss_fn=take_loss)
    schedule.step(**batch, target=torch.zeros(8), losses=losses, return_outputs=False)  # every rank
    sum_tied_gradients(stage)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from .channel import Channel
from .coded import MisuseError
from .device import Device
from .promises import making_again
from .recompute import Twice


def as_pipeline_stage(
    devices: Sequence[type[Device]],
    index: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> PipelineStage:
    """Make the PipelineStage of rank `index`; its `submod` is a `Relay`, with the stage inside.

    Model inputs (labels, masks and the first stage's too) are keyword arguments of `schedule.step`;
    a stage takes those that it needs. The last stage's output is the scalar loss, which cannot be
    merged: use `return_outputs=False`. torch runs every stage once more at the first step, to learn
    shapes. Buffers that a forward writes (BatchNorm's) are then written once too often. A stage
    of `recompute` keeps only its arguments, by torch's own checkpointing.

    Args:
        devices: the bundle's device classes, `BUNDLE.devices`.
        index: which of them, and the process's rank in `group`.
        device: where its tensors go.
        group: the processes; the default group if None.

    Raises:
        MisuseError: the bundle is no chain with one stage per device, or trains no loss at its end.
    """
    relay = Relay(devices, index).to(device)
    return PipelineStage(relay, index, len(devices), device, group=group)


def take_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the last stage's output, which is the loss: a schedule's `loss_fn`.

    `target` goes unused, but torch wants one that has as many rows as there are micro-batches.
    """
    return output


def sum_tied_gradients(stage: PipelineStage) -> None:
    """Sum the gradients of tied parameters over the stages that hold them; call it on every rank.

    After `schedule.step`, before the optimizer. All holders get the same bits: they add up the
    last stage's first, as the bundle's own runtime does.
    """
    relay = cast(Relay, stage.submod)
    for parameter, holders in relay.tied():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts = {number: grad.contiguous() for number in holders if number == relay.number}
        works = []
        for number in holders:
            if number != relay.number:
                parts[number] = torch.empty_like(parts[relay.number])
                peer = _global_rank(number, stage.group)
                works.append(dist.P2POp(dist.isend, parts[relay.number], peer, stage.group))
                works.append(dist.P2POp(dist.irecv, parts[number], peer, stage.group))
        for work in dist.batch_isend_irecv(works):
            work.wait()
        first, *others = (parts[number] for number in sorted(parts, reverse=True))
        parameter.grad = sum(others, first)


class Relay(nn.Module):
    """One stage with what its neighbours send: takes and returns all values at its two borders.

    Attributes:
        stage: the bundle's own stage module, for weights and checkpoints.
        number: which one. incoming, outgoing: names of the values at its borders, in order.
    """

    def __init__(self, devices: Sequence[type[Device]], number: int) -> None:
        super().__init__()
        _require_chain(devices)
        channels = _activations(devices)
        self.number = number
        self.device_class = devices[number]
        self.stage = self.device_class.stages[number]().train().place()
        self.incoming = _crossing(channels, number - 1)
        self.outgoing = _crossing(channels, number)
        self.twice = Twice(self.stage)
        self.reads = _Reads(self.device_class, number)

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the stage; return what the next one or a later one reads, or the loss."""
        values = dict(zip(self.incoming, map(_dense, received), strict=True))
        arguments = {name: values[value] for name, value in self.reads.received.items()}
        arguments |= {name: inputs[entry] for name, entry in self.reads.inputs.items()}
        result = self._run(arguments)
        results = result if isinstance(result, tuple | list) else (result,)
        made: dict[str, Tensor] = dict(zip(self.stage.returns, results, strict=True))
        values |= {value: made[name] for value, name in self.reads.sent.items()}
        if not self.outgoing and self.device_class.loss is not None:
            return made[self.device_class.loss[1]]
        return tuple(_dense(values[value]) for value in self.outgoing)

    def _run(self, arguments: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Run the stage; where it is one that runs again, torch keeps only its arguments."""
        if self.number not in self.device_class.recompute:
            again = self.number in getattr(self.device_class, "makes_again", ())
            with making_again() if again else nullcontext():
                return cast(Tensor, self.stage(**arguments))

        def run(*values: Tensor) -> Tensor:
            return cast(Tensor, self.stage(**dict(zip(arguments, values, strict=True))))

        return cast(
            Tensor,
            checkpoint(run, *arguments.values(), use_reentrant=False, context_fn=self._contexts),
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what the first run, and what every further one, runs in."""
        copies: dict[str, Tensor] = {}
        return self.twice.copying(copies), _Again(self.twice, copies)

    def tied(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Return the parameters that other stages hold too, and the numbers of all that do."""
        aliases = self.device_class.aliases
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.stage.named_parameters(remove_duplicate=False):
            found.setdefault(aliases.get(name, name), parameter)
        return [(found[name], stages) for name, stages in self.device_class.tied.items()]


class _Again(AbstractContextManager[None]):
    """Let a stage run once more as it first did; a schedule may ask for it more than once."""

    def __init__(self, twice: Twice, copies: Mapping[str, Tensor]) -> None:
        self.twice, self.copies = twice, copies
        self.within: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        copies = {name: copy.clone() for name, copy in self.copies.items()}
        self.within.append(self.twice.with_copies(copies))
        self.within[-1].__enter__()

    def __exit__(self, *raised: object) -> None:
        self.within.pop().__exit__(None, None, None)


def _dense(value: Tensor) -> Tensor:
    found: Tensor = _Border.apply(value)  # type: ignore[no-untyped-call]  # torch has it so
    return found


class _Border(torch.autograd.Function):
    """Hand on a value, and its gradient the other way, as dense tensors: torch sends no others."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor) -> Tensor:
        dense = value.contiguous()
        return dense.view_as(dense) if dense is value else dense

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _Reads:
    """Names of a stage's arguments and results in the model.

    The device's own `forward_<n>` gives the names: this class stands in for the device while it
    runs once, with names instead of tensors.
    """

    def __init__(self, device: type[Device], number: int) -> None:
        self.returns = device.stages[number].returns
        self.received: dict[str, str] = {}  # argument -> value
        self.inputs: dict[str, str] = {}  # argument -> model input
        self.sent: dict[str, str] = {}  # value -> result
        getattr(device, f"forward_{number}")(self, 0)

    def recv(self, channel: Channel, micro: int) -> tuple[str, str]:
        return "value", channel.value

    def batch(self, name: str, micro: int) -> tuple[str, str]:
        return "input", name

    def forward(
        self, stage: int, micro: int, **arguments: tuple[str, str]
    ) -> str | tuple[str, ...]:
        for name, (kind, what) in arguments.items():
            (self.received if kind == "value" else self.inputs)[name] = what
        return self.returns[0] if len(self.returns) == 1 else self.returns

    def send(self, channel: Channel, micro: int, result: str) -> None:
        self.sent[channel.value] = result


def _activations(devices: Sequence[type[Device]]) -> list[Channel]:
    known = {channel.tag: channel for device in devices for channel in device.channels}
    return [known[tag] for tag in sorted(known) if known[tag].kind == "activation"]


def _crossing(channels: Sequence[Channel], border: int) -> tuple[str, ...]:
    """Return the values that go from stage `border` or before to a later stage."""
    found = (channel.value for channel in channels if channel.source <= border < channel.target)
    return tuple(dict.fromkeys(found))


def _require_chain(devices: Sequence[type[Device]]) -> None:
    if any(len(device.micros) > 1 for device in devices):
        raise MisuseError(
            "PipelineStage runs one pipeline, but this bundle has replicas", code="BX5111"
        )
    stages = [tuple(device.stages) for device in devices]
    if stages != [(number,) for number in range(len(devices))]:
        held = "; ".join(f"{d.name} has {', '.join(map(str, d.stages))}" for d in devices)
        raise MisuseError(
            f"PipelineStage needs one stage per device, in order, but {held}", code="BX5112"
        )
    if devices[-1].loss is None:
        raise MisuseError(
            f"the last stage, on {devices[-1].name}, makes no loss to train on", code="BX5113"
        )


def _global_rank(number: int, group: dist.ProcessGroup | None) -> int:
    return number if group is None else dist.get_global_rank(group, number)
