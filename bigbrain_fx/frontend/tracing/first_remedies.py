"""What to do first where a model file's own code fails on its example batch.

This file knows exceptions; it knows no trace.
"""

from __future__ import annotations

from bigbrain_fx.frontend.device_dependence import help_without_gpu
from bigbrain_fx.frontend.translation.refusals import asks_a_compiler
from bigbrain_fx.frontend.translation.trace_refusals import CHOICE

_PLAIN_FIRST = "make model()(example_batch()) run in plain PyTorch first"


def first_remedy(error: Exception) -> str:
    """Say what to do first where plain PyTorch fails, too; or why it may not do so elsewhere."""
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
