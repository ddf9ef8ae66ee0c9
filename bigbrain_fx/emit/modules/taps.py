"""Layers of a device's classes that leave the gradients of their weights to a BackwardWeight.

    nn.Linear(64, 256)      becomes      Linear(64, 256)      of the bundle's runtime

A class is written once for all of a device's uses of it. A layer may tap where its gradient waits
in some use, and never where a use forbids it. The module decides on stages and layers; it writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import Graph, Stage
from bigbrain_fx.emit.modules.blocks import Template
from bigbrain_fx.emit.ops.items import Body, Layer, LayerCall, Signature
from bigbrain_fx.plan import LAYERS

TAPPING = frozenset(LAYERS.values())
"""Layers of the runtime with the names of torch.nn's."""


@dataclass
class Taps:
    """The layers that tap in one device's file.

    Attributes:
        paths: by class, the modules that are its uses.
        waits: tensors of the model whose gradients wait. must_not: others of stages that defer.
    """

    paths: Mapping[Signature, tuple[str, ...]]
    waits: set[str] = field(default_factory=set)
    must_not: set[str] = field(default_factory=set)

    def taps(self, layer: Layer, body: Body, key: Signature | None) -> bool:
        """Whether a layer in the text of a class, or of a stage (no key), taps."""
        if layer.name not in TAPPING or not layer.params:
            return False
        uses = self.uses(layer, body, key)
        return any(u <= self.waits for u in uses) and not any(u & self.must_not for u in uses)

    def uses(self, layer: Layer, body: Body, key: Signature | None) -> list[set[str]]:
        """Return the tensors of a layer in each use of its class."""
        relative = [body.relative(name) for name in layer.params]
        paths = (body.path,) if key is None else self.paths[key]
        return [{f"{path}.{name}" if path else name for name in relative} for path in paths]

    def settle(self, graph: Graph, templates: Mapping[Signature, Template]) -> None:
        """Let no tensor wait in one layer that a class which must not tap uses in another."""
        layers = [
            self.uses(call.layer, template.model.body, key)
            for key, template in templates.items()
            for call in _layer_calls(template.model.body)
        ]
        while True:
            barred = [u for uses in layers if any(u & self.must_not for u in uses) for u in uses]
            names = {graph.param[n].canonical for n in set().union(*barred) & self.waits}
            moved = {n for n in self.waits if graph.param[n].canonical in names}
            if not moved:
                return
            self.waits -= moved
            self.must_not |= moved


def _layer_calls(body: Body) -> Iterator[LayerCall]:
    """Yield the layers that a class's own text makes."""
    for item in body.items:
        steps = getattr(item, "steps", (item,))
        yield from (step for step in steps if isinstance(step, LayerCall))


def taps_of(
    graph: Graph, own: Sequence[Stage], templates: Mapping[Signature, Template]
) -> Taps | None:
    """Return the layers that tap in a device's stages; None where no stage defers."""
    stages = [stage for stage in own if stage.deferred]
    if not stages:
        return None
    paths = {key: tuple(u.body.path for u in t.uses) for key, t in templates.items()}
    found = Taps(paths)
    for stage in stages:
        for name in stage.params:
            waits = graph.param[name].canonical in stage.deferred
            (found.waits if waits else found.must_not).add(name)
    found.settle(graph, templates)
    return found
