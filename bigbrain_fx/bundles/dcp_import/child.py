"""The child process of an import from torch.distributed.checkpoint: its folder -> one safetensors.

Run as `python -m bigbrain_fx.bundles.dcp_import.child '{"folder": ..., "file": ...}'`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bigbrain_fx.bundles.dcp_import import MODEL, OPTIMIZER
from bigbrain_fx.bundles.dcp_import.keys import finished_steps, model_tensors, optimizer_keys
from bigbrain_fx.bundles.dcp_import.reading import SpreadTensor, read_distributed
from bigbrain_fx.errors import os_error_as
from bigbrain_fx.frontend import Replies
from bigbrain_fx.weights import write_tensors


def main() -> None:
    """Read as asked on the command line; report what is no tensor."""
    wanted, replies = json.loads(sys.argv.pop()), Replies()
    about = {**wanted, "folder": Path(wanted["folder"]), "file": Path(wanted["file"])}
    replies.reply(partial(convert, **about))


def convert(
    folder: Path, file: Path, names: Mapping[str, str], *, weights_alone: bool = False
) -> Mapping[str, object]:
    """Write a model's tensors, and its optimizer's; return the step and the optimizer's facts.

    Raises:
        InputError: as `dcp_tensors`.
    """
    found = read_distributed(folder)
    tensors = {f"{MODEL}{n}": tensor for n, tensor in model_tensors(found, names).items()}
    facts: Mapping[str, object] = {}
    step = 0
    if not weights_alone:
        optimizer = optimizer_keys(found, names)
        facts, step = optimizer.facts, finished_steps(found, optimizer, names)
        tensors |= {f"{OPTIMIZER}{kind}:{n}": t for (kind, n), t in optimizer.tensors.items()}
    told, help_ = "cannot put the checkpoint's tensors together", "free some space"
    with os_error_as(told, code="BX3201", at=file, help=help_):
        write_tensors(file, [(n, t.dtype_name, t.shape, _bytes_of(t)) for n, t in tensors.items()])
    return {"step": step, "facts": facts}


def _bytes_of(tensor: SpreadTensor) -> Iterator[bytes]:
    """Yield a tensor's bytes; it is read only now."""
    whole: Tensor = tensor.whole()
    yield whole.reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
