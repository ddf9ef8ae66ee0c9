"""The items of a function: ops of torch, calls of layers, calls of classes, loops.

    Op            F.relu(x)                    LayerCall       self.norm(x)       a torch.nn layer
    BlockCall     self.attention(x, mask)      SequentialCall  self.mlp(x)        nn.Sequential

The module is data; other modules find and write these items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from bigbrain_fx.core import Arg, ModuleCall, Op, Ref, leaves

Signature: TypeAlias = tuple[object, ...]
"""What the uses of one class have in common: nested tuples, only ever compared."""
Results: TypeAlias = "tuple[str | Results | None, ...]"
"""What a layer returns when it is no single tensor: values, None for one that nobody reads."""


@dataclass(frozen=True)
class Layer:
    """A layer of torch.nn as it is made: `nn.Linear(64, 256, bias=False)`.

    Attributes:
        name: its class in torch.nn.
        args: positional arguments, with the names that the constructor has for them.
        options: keyword arguments that are not at their default.
        params: names of its tensors in the model.
        frozen: none of its parameters wants a gradient.
    """

    name: str
    args: tuple[tuple[str, Arg], ...] = ()
    options: tuple[tuple[str, Arg], ...] = ()
    params: tuple[str, ...] = ()
    frozen: bool = False


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a torch.nn layer; `op` is the op that makes its value, `covered` all it runs.

    `results` is what it returns where that is a tuple, as `output, (hidden, cell)` of an nn.LSTM.
    """

    module: ModuleCall
    layer: Layer
    op: Op
    inputs: tuple[Arg, ...]
    covered: tuple[Op, ...]
    results: Results = ()

    @property
    def takes(self) -> tuple[str, ...]:
        """Values that it reads."""
        return tuple(arg.value for arg in leaves(self.inputs) if isinstance(arg, Ref))

    @property
    def gives(self) -> tuple[str, ...]:
        """The values that it makes."""
        return tuple(values_in(self.results)) if self.results else (self.op.name,)

    @property
    def returned(self) -> object:
        """Return the parts of its results that are read: equal for calls unpacked identically."""
        return _wanted(self.results)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every op that it stands for."""
        return self.covered

    @property
    def params(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return self.layer.params


def values_in(results: Results) -> Iterator[str]:
    """Yield the values of a layer's results that are read."""
    for part in results:
        if isinstance(part, tuple):
            yield from values_in(part)
        elif part is not None:
            yield part


def _wanted(results: Results) -> tuple[object, ...]:
    return tuple(_wanted(p) if isinstance(p, tuple) else p is not None for p in results)


@dataclass(frozen=True, eq=False)
class Body:
    """One function to write: a block's or a stage's forward.

    Attributes:
        path: the module that its tensors are named relative to; "" for a stage.
        call: which call of that module.
        depth: of the module in the module stacks of its ops; -1 for a stage.
        items: in order, sizes left out.
        takes: values from outside, in the order of the arguments.
        outer_params: parameters outside `path` that it reads itself.
        gives: its values that are used outside.
    """

    path: str
    call: int
    depth: int
    items: tuple[Item, ...]
    takes: tuple[str, ...]
    outer_params: tuple[str, ...]
    gives: tuple[str, ...]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every op inside, nested ones too."""
        return tuple(op for item in self.items for op in ops_of(item))

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of its own tensors, nested ones too, in order of first use."""
        names = dict.fromkeys(name for item in self.items for name in params_of(item))
        return tuple(name for name in names if is_below(name, self.path))

    @cached_property
    def has_draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(op.random for op in self.ops)

    def relative(self, name: str) -> str:
        """Return a name below `path`."""
        return name[len(self.path) + 1 :] if self.path else name


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A call of a class that is written out; `key` is what its uses have in common."""

    module: ModuleCall
    body: Body
    key: Signature

    @property
    def takes(self) -> tuple[str, ...]:
        """Values that it reads."""
        return self.body.takes

    @property
    def gives(self) -> tuple[str, ...]:
        """Values that it makes."""
        return self.body.gives

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every op inside."""
        return self.body.ops

    @property
    def params(self) -> tuple[str, ...]:
        """Names of all tensors that it reads."""
        return (*self.body.params, *self.body.outer_params)


@dataclass(frozen=True, eq=False)
class SequentialCall:
    """A call of an nn.Sequential whose children run one after the other."""

    module: ModuleCall
    steps: tuple[LayerCall | BlockCall, ...]

    @property
    def takes(self) -> tuple[str, ...]:
        """The value that the first step reads."""
        return self.steps[0].takes

    @property
    def gives(self) -> tuple[str, ...]:
        """The value that the last step makes."""
        return self.steps[-1].gives

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every op inside."""
        return tuple(op for step in self.steps for op in step.ops)

    @property
    def params(self) -> tuple[str, ...]:
        """Names of all tensors that it reads."""
        return tuple(name for step in self.steps for name in step.params)


Call: TypeAlias = LayerCall | BlockCall | SequentialCall
Item: TypeAlias = Op | Call


def takes_of(item: Item) -> tuple[str, ...]:
    """Return the values that an item reads, each once."""
    return item.refs if isinstance(item, Op) else tuple(dict.fromkeys(item.takes))


def gives_of(item: Item) -> tuple[str, ...]:
    """Return the values that an item makes."""
    return (item.name,) if isinstance(item, Op) else item.gives


def ops_of(item: Item) -> tuple[Op, ...]:
    """Return every op of an item."""
    return (item,) if isinstance(item, Op) else item.ops


def params_of(item: Item) -> tuple[str, ...]:
    """Return the names of all tensors that an item reads."""
    return item.params


def is_below(name: str, path: str) -> bool:
    """Whether a dotted name lies below a module path."""
    return not path or name.startswith(f"{path}.")


def blocks_in(items: Iterable[Item]) -> Iterator[BlockCall]:
    """Yield the calls of classes directly in a function: its own, and steps of its sequences."""
    for item in items:
        if isinstance(item, BlockCall):
            yield item
        elif isinstance(item, SequentialCall):
            yield from blocks_in(item.steps)


def all_blocks(items: Iterable[Item]) -> Iterator[BlockCall]:
    """Yield every call of a class at any depth, inner ones first."""
    for block in blocks_in(items):
        yield from all_blocks(block.body.items)
        yield block


def layers_in(items: Iterable[Item]) -> Iterator[LayerCall]:
    """Yield every call of a torch.nn layer, at any depth."""
    for item in items:
        match item:
            case LayerCall():
                yield item
            case BlockCall():
                yield from layers_in(item.body.items)
            case SequentialCall():
                yield from layers_in(item.steps)
