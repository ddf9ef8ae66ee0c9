"""Sessions that watch their caller's module: their tensors are of classes that no trace takes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from torch import nn


class Watching(Protocol):
    """Something that watches a module."""

    module: nn.Module

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a block in which the module is plain, with the weights of now."""
        ...


WATCHING: weakref.WeakSet[Watching] = weakref.WeakSet()


@contextmanager
def plain_modules() -> Iterator[None]:
    """Let the modules of all open sessions be plain for a block: a loss may call one in a trace."""
    with ExitStack() as stack:
        for each in list(WATCHING):
            stack.enter_context(each.unwatched())
        yield


def require_own_weights(model: nn.Module, others: Iterable[Watching]) -> None:
    """Refuse a model that trains a weight of an open session's model.

    The devices of both would have copies, each without the steps of the other.

    Raises:
        InputError: names the weight.
    """
    theirs = {id(parameter) for each in others for parameter in each.module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in theirs and parameter.requires_grad:
            raise InputError(
                f"the model shares {name} with the model of an open session, whose devices have "
                "a copy of it",
                code="BX3203",
                help="train both in one session: a model that has both, and a loss that goes by "
                "the batch",
            )
