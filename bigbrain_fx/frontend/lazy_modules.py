"""Lazy modules, given their sizes as a first forward does: one forward on the example batch.

It runs in eval mode and without gradients, so statistics and dropout stay as they were.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.step import modes_kept, route


def has_lazy(model: nn.Module) -> bool:
    """Whether a parameter or buffer has no shape before a first forward."""
    return any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def give_sizes(model: nn.Module, batch: object, loss: object) -> None:
    """Run the model once on a batch; where that fails, it stays as it is.

    Args:
        model: some of whose modules are lazy.
        batch: the example batch.
        loss: the file's loss function, or None: it says how a batch reaches forward.
    """
    with modes_kept(model), torch.no_grad():
        model.eval()
        try:
            route(model, batch, loss is not None).call(model, batch)
        except InputError:
            raise
        except Exception:
            return  # whoever needs the sizes names the module
