"""Put the numbers of a checkpoint into a model that was built without: for comparisons, here.

This file holds a whole model in memory, unlike the road from a checkpoint to a bundle.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from bigbrain_fx.frontend.hf.weights import converted
from bigbrain_fx.frontend.tracing.blank import supply, unmark
from bigbrain_fx.frontend.translation.params import store
from bigbrain_fx.weights import Checkpoint, Scratch, match, read_checkpoint


def fill(model: nn.Module, path: Path) -> None:
    """Read a checkpoint into a model, as `split --weights` does into a bundle.

    Raises:
        InputError: the checkpoint does not fit the model, or is gone.
    """
    checkpoint = read_checkpoint(path)
    kept = store(model, {})
    with Scratch("weights") as scratch:
        named = Checkpoint(checkpoint.path, converted(model, checkpoint, Path(scratch)))
        for name, stored in match(kept.params, named).sources.items():
            tensor = kept.tensors[name]
            with safe_open(stored.file, framework="pt") as file:
                found = file.get_tensor(stored.key).to(tensor.dtype)
            if tensor.device.type == "meta":
                supply(tensor, found)
                continue
            with torch.no_grad():
                tensor.copy_(found)  # its reserved memory becomes real
            unmark(tensor)
