"""How a process ends: exit codes, by which its launcher tells whether to look elsewhere for why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .coded import CodedError
from .limits import headline

CONTROL = "BIGBRAIN_CONTROL"  # in the environment: the file descriptor of a supervisor's line
BAD_INPUT = 2  # exit code; as argparse's
NOT_SAVED = 73  # where the files of --save cannot be written: EX_CANTCREAT of sysexits.h
PEER_LOST = 75  # where it is another that failed: EX_TEMPFAIL
TAKEN_OVER = 77  # where another run or a rollback owns its commits: EX_NOPERM


class PeerLostError(CodedError, ConnectionError):
    """The process at the other end of a channel is gone: look for the reason there."""


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
