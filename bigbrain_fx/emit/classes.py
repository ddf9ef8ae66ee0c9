"""Templates and stages -> class definitions: nn.Modules with the names of the original model.

This room knows stages and blocks; it knows nothing of devices, messages or schedules.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import Graph, Op, Param, Stage
from bigbrain_fx.emit.blocks import (
    Blocks,
    Instance,
    Number,
    Signature,
    Template,
    Where,
    draws,
    find_blocks,
    numbers,
    runs,
)
from bigbrain_fx.emit.function import BlockCall, BlockLoop, FunctionText, Item
from bigbrain_fx.emit.hints import assigned_names, value_names
from bigbrain_fx.emit.names import Names, identifier
from bigbrain_fx.emit.scope import Scope, make_scope, with_sizes
from bigbrain_fx.emit.tree import Tree, put, super_init
from bigbrain_fx.randomness import draw_places
from bigbrain_fx.units import is_size


@dataclass(frozen=True)
class StageText:
    """One stage, ready to print.

    `arguments` maps received values and model inputs to argument names, `results` returned values
    to public names; `classes` are the keys of the block classes it uses.
    """

    stage: Stage
    name: str
    lines: tuple[str, ...]
    arguments: Mapping[str, str]
    results: Mapping[str, str]
    classes: tuple[Signature, ...]


@dataclass
class Classes:
    """All classes of one bundle, so that every device file names and writes them alike."""

    graph: Graph
    stages: Sequence[Stage]
    results: Sequence[tuple[str, ...]]
    hints: Mapping[str, str] = field(init=False)
    blocks: Blocks = field(init=False)

    def __post_init__(self) -> None:
        self.hints = value_names(self.graph)
        self.variables = frozenset(assigned_names(self.graph))
        self.places = draw_places(self.graph)
        ops = [tuple(self.graph.op[name] for name in stage.ops) for stage in self.stages]
        gives = [frozenset(results) for results in self.results]
        self.blocks = find_blocks(self.graph, ops, gives, self.places)
        taken = Names(["Tensors", "Region", "Stage", "Device", "Channel", "buffer", "parameter"])
        for stage in self.stages:  # as many as devices, or more
            taken.taken |= {f"Stage{stage.index}", f"Device{stage.index}"}
        used = [key for stage in self.stages for key in self._used(stage)]
        self.class_names = {
            key: taken.fresh(identifier(_short(self.blocks.templates[key].module)))
            for key in dict.fromkeys(used)
        }

    # ------------------------------------------------------------------ block classes

    def block_lines(self, key: Signature) -> list[str]:
        """Return the class definition of one block."""
        template = self.blocks.templates[key]
        scope = template.model.scope
        varying = self._varying_names(template)
        arguments = self._argument_names(scope)
        text = FunctionText(
            self.graph,
            self.hints,
            scope.path,
            {value: arguments[value] for value in scope.takes},
            scope.gives,
            {name: arguments[name] for name in scope.outer_params},
            self._draws(scope),
            {where: name for where, name in varying.items() if where[0] != "param"},
            self.variables,
        )
        head = [
            f"class {self.class_names[key]}(Region):",
            f'    """{self._block_doc(template)}"""',
            "",
        ]
        init = self._block_init(scope, varying)
        signature = ", ".join(["self", *arguments.values()])
        return [*head, *init, f"    def forward({signature}):", *text.lines(scope.ops, 8)]

    def _block_init(self, scope: Scope, varying: Mapping[Where, str]) -> list[str]:
        tree: Tree = {}
        for name in scope.params:
            put(tree, scope.relative(name), self._tensor(self.graph.param[name]))
        for where, name in varying.items():
            if where[0] == "param":
                put(tree, str(where[1]), self._varying_tensor(scope, str(where[1]), name))
        names = list(dict.fromkeys(varying.values()))
        lines = [f"    def __init__({', '.join(['self', *names])}):", *super_init(tree, 8)]
        kept = dict.fromkeys(name for where, name in varying.items() if where[0] != "param")
        lines += [f"        self.{name} = {name}" for name in kept]
        return [*lines, ""]

    def _varying_tensor(self, scope: Scope, relative: str, name: str) -> ast.expr:
        plain = self._tensor(self.graph.param[f"{scope.path}.{relative}"])
        if isinstance(plain, ast.Call):
            plain.args = [ast.Starred(ast.Name(name))]
            return plain
        return ast.Name(name)

    def _varying_names(self, template: Template) -> dict[Where, str]:
        names, scope = Names(), template.model.scope
        found: dict[Where, str] = {}
        for places in template.varying:
            where = places[0]
            if where[0] == "param":
                base = identifier(str(where[1]))
            else:
                op = scope.ops[int(str(where[0]))]
                base = identifier(f"{self.hints[op.name]}_{op.target.split('.')[1]}")
            found.update(dict.fromkeys(places, names.fresh(base)))
        return found

    def _block_doc(self, template: Template) -> str:
        path = template.model.scope.path
        source = next((op.source for op in template.model.scope.ops if op.source), "")
        where = f", first in {source}" if source else ""
        return _plain(f"{_short(template.module)}, such as `{path}` of the model{where}.")

    # ------------------------------------------------------------------ stages

    def stage_text(self, stage: Stage) -> StageText:
        """Return one stage's class and how to call it."""
        results = self.results[stage.index]
        ops = [self.graph.op[name] for name in stage.ops]
        scope = make_scope(self.graph, ops, set(results), takes=(*stage.receives, *stage.inputs))
        names = Names()
        arguments = {value: names.fresh(self.hints[value]) for value in scope.takes}
        public = {value: names.fresh(self.hints[value]) for value in results}
        items = self._rolled(self._items(stage, scope), stage)
        text = FunctionText(
            self.graph,
            self.hints,
            "",
            arguments,
            results,
            draws=self._draws(scope),
            variables=self.variables,
        )
        name = f"Stage{stage.index}"
        returns = ", ".join(repr(n) for n in public.values()) + ("," if len(public) == 1 else "")
        head = [
            f"class {name}(Stage):",
            f'    """{self._stage_doc(stage)}"""',
            "",
            f"    returns = ({returns})",
            "",
        ]
        init = self._stage_init(stage)
        signature = ", ".join(["self", *arguments.values()])
        lines = [*head, *init, f"    def forward({signature}):", *self._under_autocast(text, items)]
        return StageText(stage, name, tuple(lines), arguments, public, tuple(self._used(stage)))

    def _under_autocast(self, text: FunctionText, items: list[Item]) -> list[str]:
        if self.graph.autocast is None:
            return text.lines(items, 8)
        where = next(iter(text.arguments.values()), "self")
        head = (
            f"        with torch.autocast({where}.device.type, dtype=torch.{self.graph.autocast}):"
        )
        return [head, *text.lines(items, 12)]

    def _stage_doc(self, stage: Stage) -> str:
        paths = dict.fromkeys(
            ".".join(op.module_path.split(".")[:2])
            for op in (self.graph.op[name] for name in stage.ops)
            if op.module_path
        )
        names = list(paths)
        span = f"{names[0]} to {names[-1]}" if len(names) > 1 else (names[0] if names else "values")
        return _plain(f"Stage {stage.index}, for device {stage.device}: {span}.")

    def _stage_init(self, stage: Stage) -> list[str]:
        tree: Tree = {}
        inside = {name: i for i in self._instances(stage) for name in i.scope.params}
        order = {param.name: position for position, param in enumerate(self.graph.params)}
        ties: list[str] = []
        first: dict[str, str] = {}
        for name in sorted(stage.params, key=lambda name: order[name]):
            param = self.graph.param[name]
            twin = first.setdefault(param.canonical, name)
            if twin != name and param.kind == "parameter":
                ties.append(f"        self.tie({name!r}, {twin!r})")
            if name in inside:
                put(tree, inside[name].scope.path, self._construct(inside[name]))
            else:
                put(tree, name, self._tensor(param))
        return ["    def __init__(self):", *super_init(tree, 8), *ties, ""]

    def _construct(self, instance: Instance) -> ast.expr:
        key = self._key_of(instance)
        template = self.blocks.templates[key]
        values = numbers(self.graph, instance.scope)
        arguments: list[ast.expr] = [_literal(values[places[0]]) for places in template.varying]
        return ast.Call(ast.Name(self.class_names[key]), arguments, [])

    def _items(self, stage: Stage, scope: Scope) -> list[Item]:
        """Replace the ops of each block by a call of its class."""
        starts: dict[str, Instance] = {}
        inside: set[str] = set()
        for instance in self._instances(stage):
            body = [op.name for op in scope.ops if op.name in instance.names and not is_size(op)]
            starts[body[0]] = instance
            inside |= {op.name for op in instance.scope.ops}
        items: list[Op | BlockCall] = []
        for op in scope.ops:
            if op.name in starts:
                items.append(self._call(starts[op.name]))
            elif op.name not in inside and not is_size(op):
                items.append(op)
        return list(with_sizes(self.graph, items, scope.takes))

    def _call(self, instance: Instance) -> BlockCall:
        scope = instance.scope
        source = next((op.source for op in scope.ops if op.source), "")
        return BlockCall(
            scope.path,
            scope.call,
            scope.takes,
            scope.outer_params,
            scope.gives,
            self._key_of(instance),
            any(op.random for op in scope.ops),
            "" if source else source,
        )

    def _rolled(self, items: list[Item], stage: Stage) -> list[Item]:
        """Turn runs of blocks that feed each other into loops."""
        rolled: list[Item] = []
        position = 0
        while position < len(items):
            run = _chain(items, position, set(self.results[stage.index]))
            if len(run) > 1:
                parent = run[0].path.rpartition(".")[0]
                carried = run[1].takes.index(run[0].gives[0])
                whole = self._is_whole(stage, parent, run)
                rolled.append(BlockLoop(tuple(run), carried, parent, whole))
                position += len(run)
            else:
                rolled.append(items[position])
                position += 1
        return rolled

    def _is_whole(self, stage: Stage, parent: str, run: Sequence[BlockCall]) -> bool:
        below = {
            name[len(parent) + 1 :].split(".")[0]
            for name in stage.params
            if name.startswith(f"{parent}.")
        }
        return below == {call.path.rpartition(".")[2] for call in run}

    # ------------------------------------------------------------------ shared

    def _instances(self, stage: Stage) -> list[Instance]:
        """Return the outermost blocks that own all of the stage's tensors below their path."""
        ops = [self.graph.op[name] for name in stage.ops]
        return list(self._outermost(stage, ops, 0))

    def _outermost(self, stage: Stage, ops: Sequence[Op], depth: int) -> list[Instance]:
        chosen: list[Instance] = []
        for module, run in runs(ops, depth):
            if module is None:
                continue
            instance = self.blocks.instances.get((stage.index, module.path, module.call))
            if instance is not None and self._owns_all(stage, instance):
                chosen.append(instance)
            else:
                chosen += self._outermost(stage, run, depth + 1)
        return chosen

    def _owns_all(self, stage: Stage, instance: Instance) -> bool:
        prefix = f"{instance.scope.path}."
        below = {name for name in stage.params if name.startswith(prefix)}
        return below == set(instance.scope.params)

    def _used(self, stage: Stage) -> list[Signature]:
        return list(dict.fromkeys(self._key_of(instance) for instance in self._instances(stage)))

    def _key_of(self, instance: Instance) -> Signature:
        return self.blocks.key_of[instance.stage, instance.scope.path, instance.scope.call]

    def _argument_names(self, scope: Scope) -> dict[str, str]:
        names = Names()
        found = {value: names.fresh(self.hints[value]) for value in scope.takes}
        return found | {
            name: names.fresh(identifier(name.rpartition(".")[2])) for name in scope.outer_params
        }

    def _draws(self, scope: Scope) -> dict[str, tuple[str | int, ...]]:
        """Return the arguments of `self.key` for each random op of a scope."""
        found: dict[str, tuple[str | int, ...]] = {}
        for index, count, op in draws(scope, self.places):
            path, ordinal = self.places[op.name]
            relative = scope.relative(path) if path != scope.path else ""
            if not scope.path:
                found[op.name] = (relative, ordinal) if ordinal else (relative,)
            else:
                found[op.name] = (relative, index, count) if count > 1 else (relative,)
        return found

    def _tensor(self, param: Param) -> ast.expr:
        """Return how a tensor is declared: a shape, `buffer(...)` or `parameter(...)`."""
        spec = param.spec
        shape = [ast.Constant(size) for size in spec.shape]
        keywords = []
        if spec.dtype != "float32":
            keywords.append(ast.keyword("dtype", ast.Attribute(ast.Name("torch"), spec.dtype)))
        if param.kind != "parameter":
            return ast.Call(ast.Name("buffer"), [*shape], keywords)
        if not spec.requires_grad:
            keywords.append(ast.keyword("requires_grad", ast.Constant(False)))
        if keywords:
            return ast.Call(ast.Name("parameter"), [*shape], keywords)
        return ast.Tuple([*shape])


def _chain(items: Sequence[Item], start: int, results: set[str]) -> list[BlockCall]:
    """Return the longest run of calls from `start` in which each block only feeds the next."""
    first = items[start]
    if not isinstance(first, BlockCall) or len(first.gives) != 1 or not _index(first):
        return [first] if isinstance(first, BlockCall) else []
    run, carried = [first], -1
    for item in items[start + 1 :]:
        last = run[-1]
        if not isinstance(item, BlockCall) or not _follows(last, item, items, results):
            break
        position = item.takes.index(last.gives[0])
        if carried not in (-1, position) or not _same_others(run[0], item, position):
            break
        carried = position
        run.append(item)
    return run


def _follows(last: BlockCall, item: BlockCall, items: Sequence[Item], results: set[str]) -> bool:
    value = last.gives[0]
    readers = [i for i in items if value in (i.refs if isinstance(i, Op) else i.takes)]
    same_parent = last.path.rpartition(".")[0] == item.path.rpartition(".")[0]
    in_order = _index(item) is not None and _index(item) == (_index(last) or 0) + 1
    alike = item.template == last.template and item.call == last.call == 0 and len(item.gives) == 1
    return readers == [item] and value not in results and same_parent and in_order and alike


def _same_others(first: BlockCall, item: BlockCall, position: int) -> bool:
    if len(first.takes) != len(item.takes) or first.outer_params != item.outer_params:
        return False
    pairs = enumerate(zip(first.takes, item.takes, strict=True))
    return all(a == b for i, (a, b) in pairs if i != position)


def _index(call: BlockCall) -> int | None:
    last = call.path.rpartition(".")[2]
    return int(last) + 1 if last.isdigit() else None


def _short(qualified: str) -> str:
    return qualified.rpartition(".")[2]


def _literal(value: Number) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _plain(text: str) -> str:
    """Make text safe inside a docstring."""
    return " ".join(text.replace("\\", "/").replace('"', "'").split())
