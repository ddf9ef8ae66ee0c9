"""How modules are made: `nn.Linear(dim, 64)`, `Block(64, 128)`, and the names of arguments.

This module knows constructors; what their forwards do is `function`'s.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import Arg, Const, Graph, Op, Param
from bigbrain_fx.emit.modules.blocks import Blocks, Number, Template, Where, numbers
from bigbrain_fx.emit.modules.expressions import attribute, constant, dotted
from bigbrain_fx.emit.modules.kept import leaf_modules
from bigbrain_fx.emit.modules.names import OWN, Names, identifier
from bigbrain_fx.emit.modules.statements import argument_name
from bigbrain_fx.emit.modules.taps import Taps
from bigbrain_fx.emit.modules.tree import Tree, alike, put
from bigbrain_fx.emit.ops.calls import FORMS
from bigbrain_fx.emit.ops.items import (
    BlockCall,
    Body,
    Call,
    Item,
    Layer,
    LayerCall,
    SequentialCall,
    Signature,
    is_below,
)

PLAIN = {"other": "factor", "exponent": "power", "shape": "size", "a": "size", "b": "size"}
"""Better words for what torch's signatures call arguments."""
POSITIONAL = 3  # arguments of a class; more are written with their names
CHANNELS = frozenset({"in_channels", "out_channels", "num_channels", "num_features", "channels"})
FEATURES = frozenset(
    {"in_features", "out_features", "normalized_shape", "embedding_dim", "features", "dim"}
)


@dataclass(frozen=True)
class _Given:
    """Inputs to the text of one class or stage; see `Construct.tree`."""

    body: Body
    varying: Mapping[Where, str]
    tapping: Taps | None
    key: Signature | None

    def taps(self, layer: Layer) -> bool:
        """Whether a layer's weights' gradients wait."""
        return self.tapping is not None and self.tapping.taps(layer, self.body, self.key)


@dataclass
class Construct:
    """Make the modules of classes and stages.

    Attributes:
        class_names: key -> name of the class.
        parameters: key -> names of its constructor's arguments, in the order of `varying`.
    """

    graph: Graph
    blocks: Blocks
    class_names: Mapping[Signature, str]
    parameters: dict[Signature, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.statements = dict(self.graph.statements)
        for key, template in self.blocks.templates.items():  # inner classes come first
            self.parameters[key] = self._parameter_names(template)

    def names(self, template: Template) -> dict[Where, str]:
        """Return the argument that holds the number of each place that varies."""
        named = zip(self.parameters[template.key], template.varying, strict=True)
        return {where: name for name, places in named for where in places}

    def tree(
        self,
        body: Body,
        params: Sequence[str],
        varying: Mapping[Where, str],
        taps: Taps | None = None,
        key: Signature | None = None,
    ) -> Tree:
        """Return a body's children and tensors, in the order of the model.

        Args:
            body: what uses them.
            params: all tensors that belong to it.
            varying: place of a number -> constructor argument that holds it.
            taps: the layers whose weights' gradients wait.
            key: of the class, if it is no stage.
        """
        given = _Given(body, varying, taps, key)
        values = numbers(self.blocks.keys, body)
        made: dict[str, ast.expr] = {}
        held: dict[str, Sequence[str]] = {}
        for i, item in enumerate(self.blocks.keys.full(body)):
            if isinstance(item, Op):
                for path, module in leaf_modules(item, body.relative):
                    made.setdefault(path, module)
                    held[path] = [name for name in params if name.startswith(f"{path}.")]
            elif item.module.path not in made:
                made[item.module.path] = self._module(item, (i,), given, values)
                held[item.module.path] = item.params
        rank = {name: i for i, name in enumerate(self.rank(params))}
        order = {
            path: min((rank[n] for n in names if n in rank), default=len(rank))
            for path, names in held.items()
        }
        for name in params:
            if not any(name.startswith(f"{path}.") for path in made):
                made[name] = self._tensor(body, name, varying)
                order[name] = rank[name]
        tree: Tree = {}
        outermost = (path for path in made if not any(is_below(path, other) for other in made))
        for path in sorted(outermost, key=lambda path: order[path]):
            put(tree, body.relative(path), made[path])
        return tree

    def rank(self, params: Sequence[str]) -> list[str]:
        """Return tensors in the order of the model."""
        wanted = set(params)
        return [param.name for param in self.graph.params if param.name in wanted]

    # ------------------------------------------------------------------ modules

    def _module(
        self, item: Call, place: Where, given: _Given, values: Mapping[Where, Number]
    ) -> ast.expr:
        match item:
            case LayerCall():
                return self._layer(item.layer, place, given)
            case BlockCall():
                return self._block(item, place, given.varying, values)
        steps = [
            self._module(step, (*place, i), given, values) for i, step in enumerate(item.steps)
        ]
        return ast.Call(dotted("nn.Sequential"), alike(steps), [])

    def _layer(self, layer: Layer, place: Where, given: _Given) -> ast.expr:
        args = [_argument(arg, (*place, name), given.varying) for name, arg in layer.args]
        options = [
            ast.keyword(name, _argument(arg, (*place, name), given.varying))
            for name, arg in layer.options
        ]
        made = ast.Call(
            dotted(layer.name if given.taps(layer) else f"nn.{layer.name}"), args, options
        )
        if not layer.frozen:
            return made
        return ast.Call(attribute(made, "requires_grad_"), [ast.Constant(False)], [])

    def _block(
        self,
        item: BlockCall,
        place: Where,
        varying: Mapping[Where, str],
        values: Mapping[Where, Number],
    ) -> ast.expr:
        template = self.blocks.templates[item.key]
        names = self.parameters[item.key]
        given: list[ast.expr] = []
        for places in template.varying:
            where = (*place, *places[0])
            given.append(ast.Name(varying[where]) if where in varying else _literal(values[where]))
        function = ast.Name(self.class_names[item.key])
        if len(given) <= POSITIONAL:
            return ast.Call(function, given, [])
        keywords = [ast.keyword(name, arg) for name, arg in zip(names, given, strict=True)]
        return ast.Call(function, [], keywords)

    def _tensor(self, body: Body, name: str, varying: Mapping[Where, str]) -> ast.expr:
        """Return how a tensor is declared: a shape, `buffer(...)` or `parameter(...)`."""
        return declared(self.graph.param[name], varying.get(("param", body.relative(name))))

    # ------------------------------------------------------------------ names of arguments

    def _parameter_names(self, template: Template) -> tuple[str, ...]:
        body = template.model.body
        taken = Names([*OWN, *_children(body), "training", "forward"])
        return tuple(
            taken.fresh(identifier(_united([self._word(body, where) for where in places])))
            for places in template.varying
        )

    def _word(self, body: Body, where: Where) -> str:
        """Return what the number at a place is called by what takes it."""
        if where[0] == "param":
            return f"{str(where[1]).rpartition('.')[2]}_shape"
        item = self.blocks.keys.full(body)[int(str(where[0]))]
        return self._item_word(item, where[1:])

    def _item_word(self, item: Item, where: Where) -> str:
        match item:
            case Op():
                return _op_word(item, where, self.statements)
            case LayerCall():
                return str(where[0])
            case SequentialCall():
                return self._item_word(item.steps[int(str(where[0]))], where[1:])
        template = self.blocks.templates[item.key]
        named = zip(self.parameters[item.key], template.varying, strict=True)
        return next((name for name, places in named if where in places), "size")


def declared(param: Param, name: str | None = None) -> ast.expr:
    """Return how a holder declares a tensor; `name` is a variable that holds its shape."""
    shape: list[ast.expr] = [ast.Constant(size) for size in param.spec.shape]
    spec, keywords = param.spec, []
    if name is not None:
        shape = [ast.Starred(ast.Name(name))]
    if spec.dtype != "float32":
        keywords.append(ast.keyword("dtype", ast.Attribute(ast.Name("torch"), spec.dtype)))
    if param.kind != "parameter":
        return ast.Call(ast.Name("buffer"), shape, keywords)
    if not spec.requires_grad:
        keywords.append(ast.keyword("requires_grad", ast.Constant(False)))
    if keywords:
        return ast.Call(ast.Name("parameter"), shape, keywords)
    return ast.Name(name) if name is not None else ast.Tuple(shape)


def _children(body: Body) -> Iterator[str]:
    for item in body.items:
        if not isinstance(item, Op):
            yield body.relative(item.module.path).partition(".")[0]
    for name in body.params:
        yield body.relative(name).partition(".")[0]


def _argument(arg: Arg, where: Where, varying: Mapping[Where, str]) -> ast.expr:
    if where in varying:
        return ast.Name(varying[where])
    if isinstance(arg, tuple):
        return ast.Tuple([_argument(item, (*where, i), varying) for i, item in enumerate(arg)])
    if isinstance(arg, Const):
        return constant(arg)
    return _literal(arg)


def _literal(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _op_word(op: Op, where: Where, statements: Mapping[str, str]) -> str:
    """Name a number in an op: as the source line that wrote it does, else as torch does."""
    for frames in reversed(op.lines):
        for place in reversed(frames):
            kind = op.target.split(".")[1] if "." in op.target else op.target
            word = argument_name(statements.get(place, ""), kind, where)
            if word:
                return word
    form = FORMS.get(op.target)
    index = where[1] if len(where) > 1 else 0
    if where[0] == 1:
        return op.kwargs[int(str(index))][0]
    names = form.signature.names if form else ()
    word = names[int(str(index))] if int(str(index)) < len(names) else "size"
    return PLAIN.get(word, word)


def _united(words: Sequence[str]) -> str:
    """Return one name for a number that is called differently where it is used."""
    if len(set(words)) == 1:
        return words[0]
    if set(words) & CHANNELS and set(words) <= CHANNELS | FEATURES | {"size"}:
        return "channels"
    if set(words) & FEATURES and set(words) <= FEATURES | {"size"}:
        return "features"
    return Counter(words).most_common(1)[0][0]
