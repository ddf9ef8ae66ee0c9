"""Methods of one device for each message: its forwards, backwards and update.

The module knows which messages a stage needs; `schedule_text` writes the order of the methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from bigbrain_fx.core import Edge
from bigbrain_fx.emit.files.channels import Channels, DeviceFile, collected
from bigbrain_fx.emit.modules.classes import StageText
from bigbrain_fx.emit.modules.layout import wrapped
from bigbrain_fx.emit.modules.names import Names, identifier

_STATISTICS = "        self.exchange_statistics()  # of BatchNorm: those of all replicas, in order"


def forward_lines(text: StageText, file: DeviceFile, channels: Channels) -> list[str]:
    """Write a stage's forward: what it receives, computes and sends."""
    stage, stages = text.stage, file.stages
    lines = [f"    def forward_{stage.index}(self, m: int) -> None:"]
    received = _received_names(text, file)
    for edge in stages.into(stage.index, "activation"):
        variable, name = received[edge.value], channels.names[edge]
        lines.append(f"        {variable} = self.recv({name}, m){_far(edge, file, 'from')}")
    lines += [f"        {text.arguments[v]} = self.batch({v!r}, m)" for v in stage.inputs]
    passed = ", ".join(f"{name}={name}" for name in text.arguments.values())
    results = _result_names(text, received)
    call = f"self.forward({stage.index}, m{', ' + passed if passed else ''})"
    sent = stages.out_of(stage.index, "activation")
    outputs = collected(file.graph, stages, stage)
    named = f"{', '.join(results.values())} = " if results and (sent or outputs) else ""
    lines += wrapped(named + call, 8)
    names = {**text.arguments, **received, **results}
    for edge in sent:
        call = f"self.send({channels.names[edge]}, m, {names[edge.value]})"
        lines.append(f"        {call}{_far(edge, file, 'to')}")
    for name, value in outputs:
        found = names.get(value, f"self.batch({value!r}, m)")  # a model may hand an input through
        lines.append(f"        self.output({name!r}, m, {found})")
    return lines


def _received_names(text: StageText, file: DeviceFile) -> dict[str, str]:
    """Return variables for what a stage's device receives before it runs.

    That is its arguments, and outputs of the model that come to be collected only.
    """
    names = Names(text.arguments.values())
    values = [edge.value for edge in file.stages.into(text.stage.index, "activation")]
    return {v: text.arguments.get(v) or names.fresh(identifier(v)) for v in values}


def _result_names(text: StageText, received: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a stage's results that do not hide its arguments."""
    names = Names([*text.arguments.values(), *received.values()])
    return {value: names.fresh(name) for value, name in text.results.items()}


def backward_lines(text: StageText, file: DeviceFile, channels: Channels) -> list[str]:
    """Write a stage's backward: gradients come from later stages and go to earlier ones."""
    stage, stages = text.stage, file.stages
    later = f"  # gradients of weights wait for weights_{stage.index}" if stage.deferred else ""
    lines = [f"    def backward_{stage.index}(self, m: int) -> None:{later}"]
    public = {**text.arguments, **text.results}
    passed = []
    for edge in stages.into(stage.index, "gradient"):
        variable = f"{public[edge.value]}_grad"
        name = channels.names[edge]
        lines.append(f"        {variable} = self.recv({name}, m){_far(edge, file, 'from')}")
        passed.append(f"{public[edge.value]}={variable}")
    sent = {edge.value: edge for edge in stages.out_of(stage.index, "gradient")}
    order = [value for value in stage.receives if value in sent]
    call = f"self.backward({', '.join([str(stage.index), 'm', *passed])})"
    results = ", ".join(f"{public[value]}_grad" for value in order)
    lines += wrapped(f"{results} = {call}" if order else call, 8)
    for edge in stages.out_of(stage.index, "gradient"):
        call = f"self.send({channels.names[edge]}, m, {public[edge.value]}_grad)"
        lines.append(f"        {call}{_far(edge, file, 'to')}")
    return [*lines, *_reduced(stage.index, file, waits=False)]


def weight_lines(text: StageText, file: DeviceFile) -> list[str]:
    """Write what makes the gradients of weights that the backward left out."""
    number = text.stage.index
    call = f"        self.backward_weight({number}, m)"
    head = f"    def weights_{number}(self, m: int) -> None:"
    return [head, call, *_reduced(number, file, waits=True)]


def _reduced(stage: int, file: DeviceFile, *, waits: bool) -> list[str]:
    """Write that what a backward has completed goes to the other replicas."""
    stages = file.stages
    own = (bucket for bucket in stages.buckets if stage in bucket.stages)
    if all(stages.waits_for(bucket.name, stage) != waits for bucket in own):
        return []
    more = ", deferred=True" if waits else ""
    return [f"        self.reduce_gradients({stage}, m{more}){_peers(stage, file)}"]


def _peers(stage: int, file: DeviceFile) -> str:
    """Name the devices that hold the same parameters in other replicas."""
    others = [s for b in file.stages.buckets if stage in b.stages for s in b.stages if s != stage]
    names = dict.fromkeys(identifier(file.stages.stages[other].device) for other in others)
    return f"  # with {', '.join(names)}" if names else ""


def update_lines(file: DeviceFile, channels: Channels) -> list[str]:
    """Write the end of a step: sums over replicas, tied gradients, norms, losses, the optimizer."""
    lines = ["    def update(self) -> None:"]
    lines += ["        self.sum_gradients()  # over all replicas"] if file.stages.buckets else []
    lines += [_STATISTICS] if _writes(file) else []
    for kind, suffix in (("tied", "tied"), ("norm", "norms"), ("loss", "losses")):
        edges = [edge for edge in channels.edges if edge.kind == kind]
        mine = [e for e in edges if channels.device_of[e.source] == file.program.device]
        theirs = [e for e in edges if channels.device_of[e.target] == file.program.device]
        lines += [
            f"        self.send_{suffix}({channels.names[e]}){_far(e, file, 'to')}" for e in mine
        ]
        lines += [
            f"        self.recv_{suffix}({channels.names[e]}{_replica(e, file)})"
            f"{_far(e, file, 'from')}"
            for e in theirs
        ]
    lines.append("        self.optimizer_step()")
    back = "        self.gather_weights()  # those that other replicas have updated"
    return [*lines, *([back] if file.stages.zero_stage and not file.stages.gathers else [])]


def _writes(file: DeviceFile) -> bool:
    """Whether a device writes running statistics that other replicas write too."""
    own = {stage.index for stage in file.stages.of(file.program.device)}
    return any(own.intersection(each.stages) for each in file.stages.statistics)


def _replica(edge: Edge, file: DeviceFile) -> str:
    """Say whose losses these are."""
    return f", {file.stages.stages[edge.source].replica}" if edge.kind == "loss" else ""


def _far(edge: Edge, file: DeviceFile, word: str) -> str:
    if file.stages.is_local(edge):
        return "  # stays here"
    far = edge.source if word == "from" else edge.target
    return f"  # {word} {identifier(file.stages.stages[far].device)}"
