"""Copies of states of devices."""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.runtime.state import State


def kept_state(state: State) -> State:
    """Return a copy that later steps do not change."""
    tensors = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors)
