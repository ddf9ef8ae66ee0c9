"""The child process of `trying`: rules and a bundle's optimizer are tried where torch is.

Run as `python -m bigbrain_fx.bundles.resplitting.child '{"bundle": ...}'`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from bigbrain_fx.core import Shard
from bigbrain_fx.frontend import Replies, failed_rules, require_divided


def main() -> None:
    """Answer the parent's requests until it has no more."""
    wanted, replies = json.loads(sys.argv.pop()), Replies()
    for line in replies.requests:
        replies.reply(partial(_answer, json.loads(line), Path(wanted["bundle"])))


def _answer(request: Mapping[str, Any], bundle: Path) -> Mapping[str, object]:
    if request["do"] == "rules":
        return {"failed": failed_rules(Path(request["path"]))}
    shards = TypeAdapter(tuple[Shard, ...]).validate_python(request["shards"])
    sys.path.insert(0, str(bundle))
    training = importlib.import_module("train").BUNDLE.training
    require_divided(_Named(request["trained"]), training.optimizer, shards)
    return {"done": "optimizer"}


class _Named(nn.Module):
    """A model of which only names and shapes of parameters are asked for."""

    def __init__(self, shapes: Mapping[str, list[int]]) -> None:
        super().__init__()
        self.shapes = shapes

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield them, without numbers."""
        for name, shape in self.shapes.items():
            yield name, nn.Parameter(torch.empty(shape, device="meta"))


if __name__ == "__main__":
    main()
