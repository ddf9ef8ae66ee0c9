"""Values of the named arguments of each module call: the parameters of its `forward`.

Hooks note it while torch.export runs the model. The module knows hooks and proxies, not emitted
text, and no graphs before `named`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from bigbrain_fx.core import CallArguments, Graph
from bigbrain_fx.frontend.translation import rules
from bigbrain_fx.frontend.translation.batch import tensors_in
from bigbrain_fx.frontend.translation.nodes import VALUE
from bigbrain_fx.frontend.translation.sources import statements


@dataclass
class NotedArguments:
    """Arguments of calls: (module path, call) -> parameter -> name of the traced value.

    `results` are the names of the calls' results, in order.
    """

    values: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    results: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def named(self, known: Mapping[str, str]) -> tuple[CallArguments, ...]:
        """Return the calls with arguments of the graph; `known` maps nodes to the values."""
        found = []
        for key, nodes in self.values.items():
            names = tuple((name, known[node]) for name, node in nodes.items() if node in known)
            results = tuple(known[node] for node in self.results.get(key, ()) if node in known)
            if names or results:
                found.append(CallArguments(*key, names, results))
        return tuple(found)


@contextlib.contextmanager
def noting_arguments(model: nn.Module) -> Iterator[NotedArguments]:
    """Note the arguments of every call of the user's modules that is traced meanwhile."""
    given = NotedArguments()
    hooks = []
    for path, module in model.named_modules():
        signature = _signature(module)
        if path and signature is not None:
            before, after = _noter(given, path, signature), _result_noter(given, path)
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def with_hints(graph: Graph, given: NotedArguments, nodes: Iterable[fx.Node]) -> Graph:
    """Add to a graph the sources of names: arguments of calls, statements of lines.

    Args:
        graph: as translated.
        given: arguments and results of calls.
        nodes: of the trace; some do nothing and are no ops of the graph.
    """
    nodes = list(nodes)
    known = {name: name for name in graph.op}
    known |= {node.name: node.meta[VALUE] for node in nodes if VALUE in node.meta}
    known |= {_input(i - len(graph.inputs)): entry.name for i, entry in enumerate(graph.inputs)}
    for op in graph.ops:  # what a region gives has the region's name before its own
        region = graph.op.get(op.refs[0]) if op.target == "operator.getitem" else None
        if region is not None and region.body is not None:
            known[region.body.outputs[int(str(op.args[1]))]] = op.name
    for node in nodes:
        source = node.args[0] if node.args else None
        idle = rules.may_do_nothing(node.target) or rules.is_idle_dropout(node)
        if idle and isinstance(source, fx.Node) and source.name in known:
            known.setdefault(node.name, known[source.name])
    places = [place for op in graph.ops for frames in op.lines for place in frames]
    return replace(graph, arguments=given.named(known), statements=statements(places))


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of a module's forward; None for torch's own layers."""
    if type(module).__module__.startswith("torch."):
        return None
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _noter(given: NotedArguments, path: str, signature: inspect.Signature):  # type: ignore[no-untyped-def]  # noqa: ANN202  # a hook
    def note(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if get_proxy_mode() is None:
            return
        call = given.calls[path]
        given.calls[path] += 1
        given.values[path, call] = _values(signature, args, kwargs)

    return note


def _result_noter(given: NotedArguments, path: str):  # type: ignore[no-untyped-def]  # noqa: ANN202  # a hook
    def note(_module: nn.Module, _args: object, output: object) -> None:
        if get_proxy_mode() is not None:
            nodes = [_node(tensor) for tensor in tensors_in(output)]
            given.results[path, given.calls[path] - 1] = nodes

    return note


def _values(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, str]:
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong with it
        return {}
    named = dict(bound)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and name in named:
            named |= named.pop(name)
    values = {name: _node(value) for name, value in named.items() if isinstance(value, Tensor)}
    return {name: node for name, node in values.items() if node}


def _node(tensor: Tensor) -> str:
    """Return the name of the node that a traced tensor stands for; "" for a constant."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    if slot is None:
        return ""
    node = slot.proxy.node
    if node.op != "placeholder":
        return str(node.name)
    places = [other for other in node.graph.nodes if other.op == "placeholder"]
    return _input(places.index(node) - len(places))


def _input(from_end: int) -> str:
    """Name an input until it has its own name: inputs come last, after all tensors."""
    return f"input {from_end}"
