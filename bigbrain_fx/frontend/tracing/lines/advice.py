"""Remedies for a graph that computes something else, and for a model file that fails by itself.

The module knows the most frequent causes of a difference, and the graph's lines; it compares
nothing.
"""

from __future__ import annotations

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.device_dependence import help_without_gpu
from bigbrain_fx.frontend.tracing.hooks import FUNCTION
from bigbrain_fx.frontend.translation.refusals import asks_a_compiler
from bigbrain_fx.frontend.translation.trace_refusals import CHOICE

BY_DATA = (
    "t.data = new gives t other memory, and autograd does not count what is written through .data: "
    "write the numbers in place, with torch.no_grad(): t.copy_(new), and let what needs the old "
    "ones, backward, too, read t.clone()"
)
COMPILED = "torch.compile is left out: stages run eagerly; split --compile compiles each of them"


def advice(wrong: str, graph: Graph) -> str:
    """Return the most frequent cause of such a difference, as advice."""
    if "backward writes" in wrong:
        return (
            "write it in forward, under torch.no_grad(): devices run forwards of later "
            "micro-batches before this one's backward; where a checkpoint runs it again (a "
            "BatchNorm in it), take the checkpoint out: split --activation-checkpointing all runs "
            "forwards again, "
            "and writes once"
        )
    if "gradient" in wrong and any(op.random for op in graph.ops):
        return (
            "checkpoint(..., preserve_rng_state=False) draws other masks in its backward: leave "
            "that argument out; or something changes gradients beside the ops, on a node of "
            f"autograd or on what it saves: take it out, or {FUNCTION}"
        )
    if "gradient" in wrong:
        return (
            "something changes gradients beside the ops, on a node of autograd, on what it saves "
            f"(saved_tensors_hooks) or on a parameter's accumulator: take it out, or {FUNCTION}"
        )
    return (
        "keep out of forward and loss: the clock, seeds (torch.manual_seed, fork_rng), Python's "
        "random numbers, state that is no buffer, and what is otherwise in a trace alone: `type(x) "
        "is torch.Tensor` (use isinstance), an `except` that catches what float(x) raises (compute "
        "with tensors); what changes from step to step comes with the batch, as a tensor of "
        "batches()"
    )


def where_differs(graph: Graph, wrong: str) -> str:
    """Return the user's line of the op that reads the tensor a difference is about."""
    words = set(wrong.split())
    readers = (op for op in graph.ops if words.intersection((op.name, *op.params)))
    return next((op.source for op in readers if op.source), "")


_PLAIN_FIRST = "make one step of a plain PyTorch loop run with this file's names first"


def first_remedy(error: Exception) -> str:
    """Return the first remedy where plain PyTorch fails, too, or why it may run elsewhere."""
    if "'dict' object has no attribute" in str(error):
        return (
            "a batch that is a dict of any kind comes as a plain one: read batch['x'] for batch.x, "
            "or name forward's parameters like its entries: forward(self, x)"
        )
    if asks_a_compiler(error):
        return CHOICE
    return help_without_gpu(error) or _PLAIN_FIRST


OF_CRITERION = (
    "the loss is called as loss(output, batch), with the whole batch: loss=lambda output, batch: "
    "criterion(output, batch[1])"
)
