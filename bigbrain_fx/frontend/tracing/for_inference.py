"""What else a trace for inference is asked: do rows stand alone, does torch's own fast path agree?

This runs the model, where that is affordable; what it finds is said, and noted in the graph.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.tracing.check import affordable
from bigbrain_fx.frontend.tracing.export import ambient, quiet
from bigbrain_fx.frontend.tracing.plain import Plain, state_kept
from bigbrain_fx.frontend.tracing.rows_apart import (
    RUNS,
    are_near,
    mixed_outputs,
    remark,
    remark_of_lone,
)
from bigbrain_fx.frontend.translation.batch import Batch

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_UNLIKE = (
    "nn.TransformerEncoder and its parts have a fused path, taken without gradients, whose numbers "
    "are others here: zeros at places that a padding mask leaves out. The bundle computes as with "
    "torch.backends.mha.set_fastpath_enabled(False): read no such places, or set them to 0 yourself"
)


def asked_for_inference(plain: Plain, batch: Batch, graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph with what was found, and remarks; nothing of a model too large to run here.

    Args:
        plain: runs the model in eval mode.
        batch: the example.
        graph: its trace.
    """
    if not affordable(graph, (RUNS * batch.rows,)):
        return graph, ()
    dims, said = graph.output_dims, tuple[str, ...]()
    for name in mixed_outputs(plain, batch, dims):
        if dims[name] is None:
            said += (remark_of_lone(name),)
        elif graph.rows_apart:
            graph, said = replace(graph, rows_apart=False), (remark(name, batch.rows), *said)
    return graph, said if _fast_path_agrees(plain, batch) else (*said, _UNLIKE)


def _fast_path_agrees(plain: Plain, batch: Batch) -> bool:
    """Whether torch computes the same where it may take its fused path."""
    if not any(isinstance(part, _FUSED) for part in plain.model.modules()):
        return True
    try:
        pairs = zip(_run(plain, batch, True), _run(plain, batch, False), strict=True)
        return all(are_near(one, other) for one, other in pairs)
    except Exception:  # the user's own code, in a way it may not know
        return True


def _run(plain: Plain, batch: Batch, fused: bool) -> tuple[Tensor, ...]:
    before = torch.backends.mha.get_fastpath_enabled()
    tensors = list(batch.sized(batch.rows).values())
    try:
        with quiet(), state_kept(plain.model), ambient(plain.autocast, tensors), torch.no_grad():
            torch.backends.mha.set_fastpath_enabled(fused)
            torch.default_generator.manual_seed(0)
            return tuple(plain.step(*tensors))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
