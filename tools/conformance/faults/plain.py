"""Start the processes of a bundle without a supervisor, as several hosts would, and wait for all.

    python plain.py WORLD WORDS-OF-TRAIN.PY...   (in the bundle; it imports nothing of ours)
    python plain.py WORLD --mpi WORDS...         (sets what Open MPI's mpirun sets, and like it
                                                  ends all processes when one is killed)

It writes what it started to ../events.jsonl. Its exit code is the first one that is not zero and no
signal: what those say who were not killed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


def main() -> int:
    """Start, wait, and return the exit code."""
    world, words = int(sys.argv[1]), sys.argv[2:]
    as_mpi = words[0] == "--mpi"
    words = words[1:] if as_mpi else words
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names = MPI if as_mpi else TORCH
    processes = []
    for rank in range(world):
        place = dict(zip(names, map(str, (rank, world, rank)), strict=True))
        processes.append(_start(rank, words, {**common, **place}))
    if as_mpi:
        _end_all_with_one(processes)
    codes = [process.wait() for process in processes]
    failed = [code for code in codes if code]
    return next((code for code in failed if code > 0), failed[0] if failed else 0)


def _end_all_with_one(processes: list[subprocess.Popen[bytes]]) -> None:
    while all(process.poll() is None for process in processes):
        time.sleep(0.01)
    if any(process.poll() for process in processes):
        for process in processes:
            process.terminate()


def _start(rank: int, words: list[str], ours: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "train.py", *words], env={**os.environ, **ours}, stdin=subprocess.DEVNULL
    )
    with Path("../events.jsonl").open("a") as file:
        entry = {"time": time.time(), "event": "started", "device": f"d{rank}", "pid": process.pid}
        file.write(json.dumps({**entry, "generation": 0}) + "\n")
    return process


if __name__ == "__main__":
    sys.exit(main())
