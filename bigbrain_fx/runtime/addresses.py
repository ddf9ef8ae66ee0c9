"""Rendezvous of the processes of several hosts: copied into bundles whose plan has several."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .coded import InputError
from .disk import read_regular
from .json_once import once
from .rendezvous import environment_number


def require_address(folder: Path) -> None:
    """Refuse at once what would wait for its whole deadline: nobody said where rank 0 is.

    Raises:
        InputError: the plan has several hosts, or Slurm has given several, and no MASTER_ADDR;
            or it cannot be read.
    """
    if "MASTER_ADDR" in os.environ:
        return
    path = folder / "plan.json"
    try:
        found = json.loads(read_regular(path), object_pairs_hook=once)
        host = {device["name"]: device["host"] for device in found["cluster"]["devices"]}
        used = list(dict.fromkeys(host[stage["device"]] for stage in found["stages"]["stages"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not as it was written: copy the bundle again", code="BX5129"
        ) from error
    nodes = environment_number("SLURM_NNODES", 1)
    if len(used) > 1 or nodes > 1:
        what = f"this plan has devices of {len(used)} hosts ({', '.join(used)})"
        what = what if len(used) > 1 else f"Slurm has given {nodes} nodes"
        raise InputError(
            f"{what}, and MASTER_ADDR does not say where rank 0 is: set MASTER_ADDR to the host of "
            "rank 0 for all processes (127.0.0.1 where all are on one); `bigbrain-fx "
            "launch-script` writes a file that does",
            code="BX5130",
        )
