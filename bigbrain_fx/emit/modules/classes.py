"""Templates and stages -> class definitions: nn.Modules with the names of the original model.

This module knows stages and blocks; it knows nothing of devices, messages or schedules.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import Graph, Op, Stage
from bigbrain_fx.emit.modules import kept
from bigbrain_fx.emit.modules.again import AGAIN, WIDENED
from bigbrain_fx.emit.modules.annotations import TENSOR, number_type, signature, value_type
from bigbrain_fx.emit.modules.blocks import (
    Blocks,
    Template,
    Where,
    find_blocks,
    inner_blocks,
    numbers,
)
from bigbrain_fx.emit.modules.construct import Construct
from bigbrain_fx.emit.modules.expressions import attribute
from bigbrain_fx.emit.modules.function import FunctionText
from bigbrain_fx.emit.modules.hints import hints, value_names
from bigbrain_fx.emit.modules.layout import wrapped
from bigbrain_fx.emit.modules.names import DeviceNames, Names, device_names, identifier
from bigbrain_fx.emit.modules.rolling import Roller
from bigbrain_fx.emit.modules.taps import TAPPING, Taps, taps_of
from bigbrain_fx.emit.modules.tidy import tidied
from bigbrain_fx.emit.modules.tree import init_lines, tie_lines, ties
from bigbrain_fx.emit.modules.writing import Writing
from bigbrain_fx.emit.ops.items import (
    BlockCall,
    Body,
    Item,
    LayerCall,
    Signature,
    layers_in,
    ops_of,
)
from bigbrain_fx.frontend import draw_places
from bigbrain_fx.plan import holders, stage_format, widening

OURS = (
    *("torch", "nn", "F", "math", "bucket_channels", TENSOR),
    *("Tensors", "Region", "Stage", "Device", "InferenceDevice", "Channel", "buffer", "parameter"),
    *kept.RUNTIME,
)


@dataclass(frozen=True)
class StageText:
    """One stage, ready to print.

    `arguments` maps received values and model inputs to argument names, `results` returned values
    to public names. `classes` are the keys of the classes it uses, inner ones first.
    """

    stage: Stage
    name: str
    lines: tuple[str, ...]
    arguments: Mapping[str, str]
    results: Mapping[str, str]
    classes: tuple[Signature, ...]


@dataclass
class Classes:
    """All classes of one bundle: every device file has the same names and texts for them."""

    graph: Graph
    stages: Sequence[Stage]
    results: Sequence[tuple[str, ...]]
    all_devices: Sequence[str] = ()  # of the bundle, where these stages are on some of them
    hints: Mapping[str, str] = field(init=False)
    blocks: Blocks = field(init=False)
    devices: Mapping[str, DeviceNames] = field(init=False)
    place: Mapping[int, int] = field(init=False)
    wide: frozenset[str] = field(init=False)
    numbered: frozenset[Signature] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = device_names(self.all_devices or [stage.device for stage in self.stages])
        again = frozenset(name for stage in self.stages for name in stage.again)
        self.graph = tidied(self.graph, again)
        self.wide = again & frozenset(widening(self.graph))
        self.place = {stage.index: place for place, stage in enumerate(self.stages)}
        self.whole = value_names(self.graph)
        self.hints = self.whole.names
        self.places = draw_places(self.graph)
        self.blocks = find_blocks(self.graph, self.stages, self.results, self.places)
        self.numbered = frozenset(self._numbered_keys())
        self.parameters = {(a.path, a.call): a.names for a in self.graph.arguments}
        taken = Names(OURS)
        if any(stage.deferred for stage in self.stages):
            taken.taken |= {"DeferringDevice", *TAPPING}
        taken.taken |= {f"Stage{stage.index}" for stage in self.stages}
        taken.taken |= {given.program for given in self.devices.values()}
        if self.blocks.keys.again:
            taken.taken |= {AGAIN, WIDENED, "MakingAgain"}
        self.users = kept.user_aliases(self.graph, taken)
        names = {
            key: taken.fresh(identifier(_short(template.module)), "")
            for key, template in self.blocks.templates.items()
        }
        self.class_names = names
        self.construct = Construct(self.graph, self.blocks, names)

    # ------------------------------------------------------------------ block classes

    def block_lines(self, key: Signature, taps: Taps | None = None) -> list[str]:
        """Return the class definition of one block; `taps` says which layers wait."""
        template = self.blocks.templates[key]
        body = template.model.body
        varying = self.construct.names(template)
        arguments = self._argument_names(body, template)
        outer = {name: arguments[name] for name in body.outer_params}
        takes = {value: arguments[value] for value in body.takes}
        nth = dict(self._nth(body, template))
        forward = self._forward(body, takes, outer, varying, nth).lines(8)
        init = self._block_init(body, varying, taps, key)
        shared = (template.is_shared and body.has_draws) or key in self.numbered
        text = "\n".join([*init, *forward])
        owned = (
            "self.seeded(",
            "all_seeded(",
            "self.device",
            "self.group",
            "self.call",
            "self[",
            "self.hold(",
        )
        base = "Region" if shared or any(word in text for word in owned) else "nn.Module"
        return [
            f"class {self.class_names[key]}({base}):",
            f'    """{self._block_doc(template)}"""',
            "",
            *init,
            *self._signature(arguments, body.gives),
            *forward,
        ]

    def _block_init(
        self, body: Body, varying: Mapping[Where, str], taps: Taps | None, key: Signature
    ) -> list[str]:
        tree = self.construct.tree(body, body.params, varying, taps, key)
        names = list(dict.fromkeys(varying.values()))
        full = self.blocks.keys.full(body)
        used = {
            name
            for where, name in varying.items()
            if isinstance(where[0], int) and isinstance(full[where[0]], Op)
        }
        if not tree and not used:
            return []
        given = numbers(self.blocks.keys, body)
        types = {name: number_type(given[where]) for where, name in varying.items()}
        made = signature("__init__", {name: types[name] for name in names}, ["None"])
        lines = [*wrapped(made, 4), *init_lines(tree, 8)]
        return [*lines, *(f"        self.{name} = {name}" for name in names if name in used), ""]

    def _block_doc(self, template: Template) -> str:
        path = template.model.module.path
        source = next((op.source for op in template.model.ops if op.source), "")
        where = f", first in {source}" if source else ""
        return _plain(f"{_short(template.module)}, such as `{path}`{where}.")

    def _argument_names(self, body: Body, template: Template) -> dict[str, str]:
        names = Names()
        found = {
            value: names.fresh(identifier(self._parameter(template, i) or self.hints[value]))
            for i, value in enumerate(body.takes)
        }
        return found | {
            name: names.fresh(identifier(name.rpartition(".")[2])) for name in body.outer_params
        }

    def _parameter(self, template: Template, position: int) -> str | None:
        """Return what the user's own forward calls an argument, as far as any use tells."""
        for use in template.uses:
            value = use.body.takes[position]
            for name, given in self.parameters.get((use.body.path, use.body.call), ()):
                if given == value:
                    return name
        return None

    # ------------------------------------------------------------------ stages

    def taps(self, stages: Sequence[Stage]) -> Taps | None:
        """Return the layers of these stages, of one device, whose weights' gradients wait."""
        return taps_of(self.graph, stages, self.blocks.templates)

    def stage_text(self, stage: Stage, taps: Taps | None = None) -> StageText:
        """Return one stage's class and how to call it."""
        place = self.place[stage.index]
        results, body = self.results[place], self.blocks.bodies[place]
        names = Names()
        arguments = {value: names.fresh(self.hints[value]) for value in body.takes}
        public = {value: names.fresh(self.hints[value]) for value in results}
        nth = dict(self._nth(body, None))
        text = self._forward(body, arguments, {}, {}, nth, results)
        name = f"Stage{stage.index}"
        returns = ", ".join(repr(n) for n in public.values()) + ("," if len(public) == 1 else "")
        head = [
            f"class {name}(Stage):",
            *self._stage_doc(stage),
            "",
            f"    returns = ({returns})",
            "",
        ]
        init = self._stage_init(stage, body, taps if stage.deferred else None)
        start = self._signature(arguments, results)
        lines = [*head, *init, *start, *self._under_autocast(text)]
        used = tuple(self.blocks.used(body))
        return StageText(stage, name, tuple(lines), arguments, public, used)

    def _under_autocast(self, text: FunctionText) -> list[str]:
        if self.graph.autocast is None:
            return text.lines(8)
        where = next(iter(text.arguments.values()), "self")
        given = f"{where}.device.type, dtype=torch.{self.graph.autocast}"
        if any(op.target.startswith("shard.") for op in self.graph.ops):
            given += ", cache_enabled=False"  # within one process ranks take turns in the middle
        return [f"        with torch.autocast({given}):", *text.lines(12)]

    def _stage_doc(self, stage: Stage) -> list[str]:
        first = f'    """{self._stage_span(stage)}'
        also = [f"`{here}` is stage {s}'s `{there}`" for here, s, there in self._also_held(stage)]
        if not also:
            return [f'{first}"""']
        more = f", and so on for {len(also) - 2} more" if len(also) > 2 else ""
        said = f"{', '.join(also[:2])}{more}: in a loop of your own, too, add up their gradients."
        lines = textwrap.wrap(_plain(said), 92)
        return [first, "", *(f"    {line}" for line in lines), '    """']

    def _also_held(self, stage: Stage) -> Iterator[tuple[str, int, str]]:
        """Yield the trained parameters that other stages have too: the name here, where, there."""
        if not self.graph.training:
            return
        beside = [s for s in self.stages if s.replica == stage.replica]
        held, name = holders(self.graph, beside), self.graph.param
        for param in stage.params:
            others = [s for s in held.get(name[param].canonical, ()) if s is not stage]
            if others:
                like = (p for p in others[0].params if name[p].canonical == name[param].canonical)
                yield param, others[0].index, next(like)

    def _stage_span(self, stage: Stage) -> str:
        paths = dict.fromkeys(
            ".".join(op.module_path.split(".")[:2])
            for op in (self.graph.op[name] for name in stage.ops)
            if op.module_path
        )
        names = list(paths)
        span = f"{names[0]} to {names[-1]}" if len(names) > 1 else (names[0] if names else "values")
        return _plain(f"Stage {stage.index}, for device {stage.device}: {span}.")

    def _stage_init(self, stage: Stage, body: Body, taps: Taps | None) -> list[str]:
        tree = self.construct.tree(body, body.params, {}, taps)
        wanted = set(body.params)
        found = ties([param for param in self.graph.params if param.name in wanted])
        start = wrapped(signature("__init__", {}, ["None"]), 4)
        lines = [*start, *init_lines(tree, 8), *tie_lines(found, 8)]
        if layout := stage_format(self.graph, stage):
            lines.append(f"        self.to(memory_format=torch.{layout})")
        if not self.graph.training and any(map(_has_modes, layers_in(body.items))):
            lines.append("        self.eval()  # as it was traced")
        return [*lines, ""]

    # ------------------------------------------------------------------ shared

    def _signature(self, arguments: Mapping[str, str], gives: Sequence[str]) -> list[str]:
        """Return the head of a forward; `arguments` maps values to names."""
        types = {name: value_type(self.graph, value) for value, name in arguments.items()}
        gives = [value_type(self.graph, value) for value in gives]
        return wrapped(signature("forward", types, gives), 4)

    def _forward(
        self,
        body: Body,
        arguments: Mapping[str, str],
        outer: Mapping[str, str],
        varying: Mapping[Where, str],
        nth: Mapping[int, ast.expr],
        results: Sequence[str] | None = None,
    ) -> FunctionText:
        full = self.blocks.keys.full(body)
        places: dict[int, dict[Where, str]] = defaultdict(dict)
        for where, name in varying.items():
            if isinstance(where[0], int) and isinstance(full[where[0]], Op):
                places[id(full[where[0]])][where[1:]] = name

        def mark(item: Item) -> object | None:
            if id(item) in nth or (isinstance(item, LayerCall) and item.op.random):
                return None
            key = item.key if isinstance(item, BlockCall) else None
            again = tuple(op.name in self.blocks.keys.again for op in ops_of(item))
            return key, tuple(places.get(id(item), {}).items()), None if key else again

        returned = body if results is None else _returning(body, results)
        steps = Roller(full, frozenset(returned.gives), mark).steps()
        known = {**arguments, **{name: name for name in outer.values()}}
        found = hints(self.graph, returned, known, self.whole)
        writing = Writing(self.graph, body, arguments, self.users, outer, places, nth)
        writing.again = self.blocks.keys.again
        writing.wide = self.wide
        keys = dict(self._keys(body))
        users = kept.user_names(self.graph, [op.name for op in body.ops])
        barred = {*outer.values(), *(self.users[user] for user in users)}
        barred |= {AGAIN, WIDENED} if self.blocks.keys.again else set()
        whole = self._whole(body)
        return FunctionText(
            self.graph, returned, steps, found, arguments, writing, keys, barred, whole
        )

    def _whole(self, body: Body):  # type: ignore[no-untyped-def]  # noqa: ANN202  # a test
        """Return a test of whether a module's children in a body are so many."""
        children: dict[str, set[str]] = defaultdict(set)
        names = [item.module.path for item in body.items if not isinstance(item, Op)]
        for path in (*names, *body.params):
            parts = path.split(".")
            for i in range(1, len(parts)):
                children[".".join(parts[:i])].add(parts[i])
        return lambda path, turns: len(children[path]) == turns

    def _nth(self, body: Body, template: Template | None) -> Iterator[tuple[int, ast.expr]]:
        """State, for calls of classes that draw, the number of the call of their module.

        A number that `nth` sets holds until the next one, for all modules below. Where another call
        of the stage goes to a module above or below, every call therefore sets its number.
        """
        drawing = [block for block, _, _ in inner_blocks(body) if block.body.has_draws]
        paths = {block.module.path for block in drawing}
        for block, number, total in inner_blocks(body):
            if not block.body.has_draws:
                continue
            if template is None:
                if block.module.call or total > 1 or _is_within(block.module.path, paths):
                    yield id(block), ast.Constant(block.module.call)
            elif total > 1:
                yield id(block), _numbered(number, total, template.is_shared)

    def _numbered_keys(self) -> Iterator[Signature]:
        """Yield the keys of classes that a stage tells which call it is."""
        for body in self.blocks.bodies:
            told = dict(self._nth(body, None))
            yield from (block.key for block, _, _ in inner_blocks(body) if id(block) in told)

    def _keys(self, body: Body) -> Iterator[tuple[str, ast.expr]]:
        """Return the `self.seeded(...)` of each op of a body that draws by itself."""
        by_path: dict[str, list[Op]] = defaultdict(list)
        own = (item for item in body.items if isinstance(item, Op | LayerCall))
        for op in (op for item in own for op in ops_of(item)):
            if op.name in self.places:
                by_path[self.places[op.name][0]].append(op)
        for path, ops in by_path.items():
            relative = body.relative(path) if path != body.path else ""
            for index, op in enumerate(ops):
                ordinal = self.places[op.name][1]
                words: list[str | int] = [relative] if relative else []
                if not body.path and ordinal:
                    words = [relative, ordinal]
                elif body.path and len(ops) > 1:
                    words = [relative, index, len(ops)]
                given: list[ast.expr] = [ast.Constant(word) for word in words]
                yield op.name, kept.seeded(op, given)


def _returning(body: Body, results: Sequence[str]) -> Body:
    """Return a stage's body with its results in the order in which they are sent."""
    return Body(
        body.path, body.call, body.depth, body.items, body.takes, body.outer_params, tuple(results)
    )


def _is_within(path: str, paths: Iterable[str]) -> bool:
    """Whether a module is above or below one of these."""
    return any(
        f"{path}.".startswith(f"{p}.") or f"{p}.".startswith(f"{path}.") for p in paths if p != path
    )


def _numbered(number: int, total: int, shared: bool) -> ast.expr:
    """Return which call of an inner module it is, counted over all calls of the outer one."""
    if not shared:
        return ast.Constant(number)
    called = ast.BinOp(attribute(ast.Name("self"), "call"), ast.Mult(), ast.Constant(total))
    return ast.BinOp(called, ast.Add(), ast.Constant(number)) if number else called


def _has_modes(item: LayerCall) -> bool:
    """Whether a layer computes something else in training."""
    return item.layer.name.startswith(("BatchNorm", "Dropout", "LSTM", "GRU", "RNN"))


def _short(qualified: str) -> str:
    return qualified.rpartition(".")[2]


def _plain(text: str) -> str:
    """Make text safe inside a docstring."""
    return " ".join(text.replace("\\", "/").replace('"', "'").split())
