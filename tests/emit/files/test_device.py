"""The emitted `step_once` is the Program: a recorder takes down the very list of instructions."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bigbrain_fx.core import (
    Asynchronous,
    Backward,
    BackwardWeight,
    Forward,
    Instruction,
    OptimizerStep,
    Recv,
    Send,
    Stage,
    Stages,
)
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.plan.cut import roots
from bigbrain_fx.plan.simulate import STEPS, steps_in_a_row
from bigbrain_fx.runtime.channel import Channel
from tests.support import samples

CELLS = samples.cases(
    (model, partitioner, schedule)
    for model in ("gpt", "unet", "encdec")
    for partitioner, schedule in (
        ("naive", "gpipe"),
        ("naive", "1f1b"),
        ("naive", "list"),
        ("scattered", "list"),
    )
)


@dataclass(frozen=True)
class Token:
    """Stands for a tensor: an activation or a gradient of a value, of one micro-batch."""

    what: str
    value: str
    micro: int


class Recorder:
    """What a device file calls, taken down instead of done; it hands out tokens for tensors.

    Mixed in before the emitted class, so that its methods are found first.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log: list[Instruction] = []
        self.kept: list[tuple[int, int, Token]] = []

    def edge(self, channel: Channel) -> Any:
        """Return the plan's edge; everything the channel says must be as planned."""
        edge = self.plan.stages.edges[channel.tag]
        at = [self.plan.stages.stages[end].device for end in (edge.source, edge.target)]
        said = (channel.kind, channel.value, channel.source, channel.target)
        assert said == (edge.kind, edge.value, edge.source, edge.target)
        assert [channel.sender, channel.receiver] == at
        return edge

    def recv(self, channel: Channel, micro: int) -> Token:
        edge, what = self.edge(channel), channel.kind
        token = Token(what, channel.value, micro)
        if channel.is_local:
            assert self.kept.pop(self.kept.index((channel.tag, micro, token)))
        else:
            self.log.append(Recv(edge, micro))
        return token

    def send(self, channel: Channel, micro: int, tensor: Token) -> None:
        assert tensor == Token(channel.kind, channel.value, micro)
        if channel.is_local:
            self.kept.append((channel.tag, micro, tensor))
        else:
            self.log.append(Send(self.edge(channel), micro))

    def batch(self, name: str, micro: int) -> Token:
        return Token("input", name, micro)

    def forward(self, stage: int, micro: int, /, **values: Token) -> Any:
        planned = self.plan.stages.stages[stage]
        assert [t.value for t in values.values()] == [*planned.receives, *planned.inputs]
        assert {t.micro for t in values.values()} <= {micro}
        self.log.append(Forward(stage, micro))
        results = tuple(
            Token("activation", value, micro) for value in roots(self.plan.graph, planned)
        )
        return results[0] if len(results) == 1 else results

    def backward(self, stage: int, micro: int, /, **gradients: Token) -> Any:
        stages = self.plan.stages
        expected = [e.value for e in stages.into(stage, "gradient")]
        assert [t.value for t in gradients.values()] == expected
        self.log.append(Backward(stage, micro))
        sent = {edge.value for edge in stages.out_of(stage, "gradient")}
        received = [v for v in stages.stages[stage].receives if v in sent]
        found = tuple(Token("gradient", value, micro) for value in received)
        return found[0] if len(found) == 1 else found

    def backward_weight(self, stage: int, micro: int) -> None:
        self.log.append(BackwardWeight(stage, micro))

    def send_tied(self, channel: Channel) -> None:
        self.log.append(Send(self.edge(channel), None))

    def recv_tied(self, channel: Channel) -> None:
        self.log.append(Recv(self.edge(channel), None))

    send_norms, recv_norms = send_tied, recv_tied

    def optimizer_step(self) -> None:
        self.log.append(OptimizerStep())


def recorded(plan: Plan, texts: Mapping[str, str], device_name: str) -> list[Instruction]:
    emitted = samples.program(plan, texts, device_name)
    device: Any = type("Recorded", (Recorder, emitted), {})(plan)
    device.step_once()
    assert device.kept == []
    return device.log


def assert_is_the_program(plan: Plan, texts: dict[str, str]) -> None:
    for program in plan.programs:
        log = recorded(plan, texts, program.device)
        assert log == list(program.instructions)


@pytest.mark.gate("gpt-naive-1f1b", "encdec-scattered-list")
@pytest.mark.parametrize(("model", "partitioner", "schedule"), CELLS)
def test_the_text_does_what_the_program_says(model: str, partitioner: str, schedule: str) -> None:
    plan = samples.plan(model, partitioner, 3, schedule)
    assert_is_the_program(plan, samples.texts(model, partitioner, 3, schedule))


@pytest.mark.gate("1-zb-h1", "2-1f1b", "16-zb-h1")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("micro_batches", [1, 2, 16])
def test_few_and_many_micro_batches(micro_batches: int, schedule: str) -> None:
    given = ("gpt", "naive", 4, schedule, micro_batches)
    assert_is_the_program(samples.plan(*given), samples.texts(*given))


def test_only_a_device_that_defers_has_layers_that_wait() -> None:
    found = samples.sample("gpt")
    options = Options("naive", schedule="1f1b", micro_batches=4, defer=(1,))
    plan = make_plan(found.graph, samples.cluster(2), found.source, options)
    texts = bundle_texts(plan)
    assert_is_the_program(plan, texts)
    first, second = texts["device_d0.py"], texts["device_d1.py"]
    assert "nn.Linear(128, 384)" in first
    assert "weights_0" not in first
    assert "DeferringDevice" not in first
    assert "nn.Linear" not in second
    assert "self.qkv = Linear(128, 384)" in second
    assert "    deferring = (1,)\n" in second


@pytest.mark.parametrize("partitioner", ["naive", "scattered"])
def test_clipping_exchanges_norms(partitioner: str) -> None:
    found = samples.sample("gpt")
    source = replace(found.source, clip_norm=1.0)
    options = Options(partitioner, micro_batches=2)
    plan = make_plan(found.graph, samples.cluster(3), source, options)
    assert any(edge.kind == "norm" for edge in plan.stages.edges)
    assert_is_the_program(plan, bundle_texts(plan))


@pytest.mark.parametrize("mode", ["2bw", "stash"])
def test_steps_that_overlap_are_written_as_they_are_forecast(mode: Asynchronous) -> None:
    found, count = samples.sample("unet"), 4
    options = Options("naive", micro_batches=count, asynchronous=mode)
    plan = make_plan(found.graph, samples.cluster(3), found.source, options)
    texts = bundle_texts(plan)
    for program, row in zip(plan.programs, steps_in_a_row(plan.programs, plan.stages), strict=True):
        emitted = samples.program(plan, texts, program.device)
        device: Any = type("Recorded", (Recorder, emitted), {})(plan)
        logged: list[Instruction] = []
        for step in range(STEPS):
            device.log, device.begins_empty, device.goes_on = [], not step, step + 1 < STEPS
            device.step_once()
            logged += [moved(each, step * count) for each in device.log]
        assert logged == list(row.instructions)
        device.log, device.begins_empty, device.goes_on = [], True, False
        device.step_once()
        once = [each for each in device.log if not isinstance(each, OptimizerStep)]
        assert once == list(program.instructions)[:-1]
        assert texts["device_d0.py"].count("class DeviceD0(AsynchronousDevice)") == 1


def moved(instruction: Any, micros: int) -> Any:
    """Return an instruction on a micro-batch of a later batch."""
    if isinstance(instruction, OptimizerStep):
        return instruction
    return replace(instruction, micro=instruction.micro + micros)


def test_one_device_talks_to_nobody() -> None:
    plan = samples.plan("gpt", "naive", 1, "gpipe", 2)
    texts = samples.texts("gpt", "naive", 1, "gpipe", 2)
    log = recorded(plan, texts, "d0")
    assert log == [Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1), OptimizerStep()]
    assert "# This device neither sends nor receives." in texts["device_d0.py"]


def test_inference_is_forwards_only() -> None:
    """Without a loss there is nothing to send back and nothing to update."""
    found = samples.sample("gpt")
    logits = found.graph.outputs[0]
    graph = replace(found.graph, loss=None, outputs=(logits,))
    plan = make_plan(graph, samples.cluster(2), found.source, Options("naive", micro_batches=2))
    assert_is_the_program(plan, bundle_texts(plan))
    kinds = {type(i) for program in plan.programs for i in program.instructions}
    assert kinds == {Forward, Send, Recv}


def test_a_schedule_without_period_is_a_table() -> None:
    text = samples.texts("encdec", "scattered", 3, "list")["device_d0.py"]
    assert "    order = (\n" in text
    assert "        for action, m in self.order:\n            getattr(self, action)(m)\n" in text


@pytest.mark.gate("gpt")
@pytest.mark.parametrize("model", ["gpt", "unet", "encdec"])
def test_a_channel_is_the_same_at_both_ends(model: str) -> None:
    """Shape, type and gradient too: the receiver posts what the sender sends."""
    plan = samples.plan(model, "scattered")
    seen: dict[int, list[Channel]] = {}
    for program in plan.programs:
        device: Any = samples.program(plan, samples.texts(model, "scattered"), program.device)
        assert device.name == program.device
        assert device.names == plan.stages.devices
        for channel in device.channels:
            seen.setdefault(channel.tag, []).append(channel)
    assert sorted(seen) == list(range(len(plan.stages.edges)))
    for tag, ends in seen.items():
        is_local = plan.stages.is_local(plan.stages.edges[tag])
        assert len(ends) == (1 if is_local else 2)
        assert len(set(ends)) == 1


def test_device_names_cannot_break_out_of_a_file() -> None:
    """A Cluster made in Python may hold any text."""
    found = samples.sample("gpt")
    cluster = samples.cluster(2)
    odd = ('d"""0\nimport os', "d'1\\")
    renamed = tuple(replace(d, name=name) for d, name in zip(cluster.devices, odd, strict=True))
    options = Options("naive", micro_batches=2)
    graph = replace(found.graph, name='Net"""\nimport os')
    plan = make_plan(graph, replace(cluster, devices=renamed), found.source, options)
    texts = bundle_texts(plan)
    for text in (text for name, text in texts.items() if name.endswith(".py")):
        imported = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import)]
        assert all(alias.name != "os" for node in imported for alias in node.names)
    assert_is_the_program(plan, texts)


def test_values_with_names_of_the_runtime_are_passed() -> None:
    """A value may be called what `forward` and `backward` call their own arguments."""
    plan = samples.plan("gpt", "naive", 2, "gpipe", 2)
    graph = plan.graph
    odd = {entry.name: name for entry, name in zip(graph.inputs, ("stage", "micro"), strict=True)}
    renamed = _renamed(plan, odd)
    assert_is_the_program(renamed, bundle_texts(renamed))


def _renamed(plan: Plan, names: dict[str, str]) -> Plan:
    """Call inputs something else, throughout."""
    graph = plan.graph

    def arg(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(arg, value))
        new = names.get(getattr(value, "value", ""))
        return replace(value, value=new) if new else value

    ops = tuple(
        replace(op, args=arg(op.args), kwargs=tuple((k, arg(v)) for k, v in op.kwargs))
        for op in graph.ops
    )
    inputs = tuple(replace(entry, name=names[entry.name]) for entry in graph.inputs)
    stages = tuple(
        replace(stage, inputs=tuple(names[name] for name in stage.inputs))
        for stage in plan.stages.stages
    )
    return replace(
        plan,
        graph=replace(graph, ops=ops, inputs=inputs),
        stages=Stages(stages, plan.stages.edges),
    )


def test_stage_numbers_are_those_of_the_plan() -> None:
    plan = samples.plan("gpt", "scattered")
    for program in plan.programs:
        device: Any = samples.program(plan, samples.texts("gpt", "scattered"), program.device)
        own: tuple[Stage, ...] = plan.stages.of(program.device)
        assert list(device.stages) == [stage.index for stage in own]
