"""How late a message of the emulated network really is: a ping-pong of two of its devices.

    python echo.py ROUNDS OUT      (run by the nursery on two devices; it imports torch only)

The device of rank 0 writes the seconds of a one-way message, as JSON. The way through gloo, the
kernel and the relay is in it: the owner has the wires deliver that much sooner.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

WARM_UP = 5


def main() -> None:
    """Send to and fro; rank 0 writes the lower quartile: disturbance only adds."""
    dist.init_process_group("gloo")
    rounds, leads = int(sys.argv[1]), dist.get_rank() == 0
    taken_s = [round_s(leads) / 2 for _ in range(WARM_UP + rounds)]
    if leads:  # the other end has not begun the first round together with us
        quartile_s = statistics.quantiles(taken_s[WARM_UP:], n=4)[0]
        Path(sys.argv[2]).write_text(json.dumps({"one_way_s": quartile_s}))
    dist.barrier()


def round_s(leads: bool) -> float:
    """Return the seconds of one message there and one back."""
    message = torch.zeros(1)
    start = time.perf_counter()
    for sends in (leads, not leads):
        if sends:
            dist.send(message, int(leads))
        else:
            dist.recv(message, int(leads))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
