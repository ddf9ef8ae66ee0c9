"""How a process ends when it is another that failed.

The launcher tells such an end by its exit code, and looks for the reason elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .coded import CodedError
from .telling import headline

PEER_LOST = 75  # exit code: EX_TEMPFAIL of sysexits.h


class PeerLostError(CodedError, ConnectionError):
    """The process at the other end of a channel is gone: look for the reason there."""


class SpoiledError(PeerLostError):
    """A message is not as it was sent: nobody has died, but it must be sent again."""


class StepAgainError(Exception):
    """Report that a step is begun again, by fewer devices: what this one has of it is gone."""


class HeadLostError(CodedError, RuntimeError):
    """Report that the supervisor that decides is lost: nobody takes another step."""


class LateMessageError(CodedError, TimeoutError):
    """Report a message that did not come within the deadline: its sender is slow, or stuck."""


@contextmanager
def blaming_peers() -> Iterator[None]:
    """End this process with PEER_LOST when a peer, or the store that all share, is gone."""
    try:
        yield
    except (PeerLostError, LateMessageError) as error:
        print(headline(error), file=sys.stderr)
        sys.exit(PEER_LOST)
    except dist.DistError as error:
        print(f"error[BX5909]: {error}", file=sys.stderr)
        sys.exit(PEER_LOST)
