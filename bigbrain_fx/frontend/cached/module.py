"""A model of token rows as a module of one position: tokens, rows and positions in, scores out.

The new module has the model's own tensors by the model's own names, and buffers for keys and
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, fx, nn

from bigbrain_fx.frontend.cached.rewrite import PositionForm, one_position
from bigbrain_fx.frontend.cached.row import Row


class Cached(nn.Module):
    """Scores [B, 1, words] of tokens [B, 1], each at its position of its row of the caches.

    Several tokens of one row may come at once, in order: each sees the earlier ones. The caches
    have one row more than `places`, for the padding of a batch.
    """

    def __init__(self, row: Row, form: PositionForm, places: int) -> None:
        super().__init__()
        model = row.model
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False, remove_duplicate=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, buffer, name not in model._non_persistent_buffers_set)
        for name, tensor in (*form.caches.items(), *form.tables.items()):
            path, _, own = name.rpartition(".")
            self.get_submodule(path).register_buffer(own, tensor, persistent=False)
        self._made = row, form
        self.places = places

    def hold(self, places: int) -> None:
        """Keep so many rows, all empty."""
        self.places = places
        for name, cache in self.caches.items():
            path, _, own = name.rpartition(".")
            empty = cache.new_zeros((places + 1, *cache.shape[1:]))
            self.get_submodule(path).register_buffer(own, empty, persistent=False)

    @property
    def row(self) -> Row:
        """The trace of the untouched model."""
        return self._made[0]

    @property
    def form(self) -> fx.Graph:
        """Return the computation as a graph."""
        return self._made[1].graph

    @property
    def caches(self) -> Mapping[str, Tensor]:
        """Names of the buffers that are caches."""
        return self._made[1].caches

    def forward(self, tokens: Tensor, row: Tensor, position: Tensor) -> Tensor:
        """Compute one position of each row."""
        with fx.traceback.preserve_node_meta():  # a trace of this has the user's modules and lines
            (scores,) = fx.Interpreter(self, graph=self.form).run(tokens, row, position)
        return cast("Tensor", scores)


def cached_module(row: Row, places: int) -> Cached:
    """Build the module of a trace, not yet tried."""
    kind = type(type(row.model).__name__, (Cached,), {"__doc__": Cached.__doc__})
    made: Cached = kind(row, one_position(row, places + 1), places)
    return made.eval()
