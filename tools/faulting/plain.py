"""Start the processes of a bundle without a supervisor, as several hosts would, and wait for all.

    python plain.py WORLD WORDS-OF-TRAIN.PY...   (in the bundle; it imports nothing of ours)

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


def main() -> int:
    """Start, wait, and return the exit code."""
    world, words = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [_start(rank, words, common) for rank in range(world)]
    codes = [process.wait() for process in processes]
    failed = [code for code in codes if code]
    return next((code for code in failed if code > 0), failed[0] if failed else 0)


def _start(rank: int, words: list[str], common: dict[str, str]) -> subprocess.Popen[bytes]:
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common}
    process = subprocess.Popen(
        [sys.executable, "train.py", *words], env={**os.environ, **ours}, stdin=subprocess.DEVNULL
    )
    with Path("../events.jsonl").open("a") as file:
        entry = {"time": time.time(), "event": "started", "device": f"d{rank}", "pid": process.pid}
        file.write(json.dumps({**entry, "generation": 0}) + "\n")
    return process


if __name__ == "__main__":
    sys.exit(main())
