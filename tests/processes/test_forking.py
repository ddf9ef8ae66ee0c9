"""What is ordered of the program that forks: files under numbers, modules, whose child it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.processes import PROGRAM
from tests.support.killing import wait_for_end

LIMIT_S = 60.0
SAYS = "import os, sys\nprint(sys.argv, os.environ['OWN'], os.read(7, 9))\nsys.exit({code!r})\n"


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("is_module", [False, True])
def test_a_fork_has_its_words_its_files_and_its_exit_code(
    tmp_path: Path, is_apart: bool, is_module: bool
) -> None:
    (tmp_path / "said.py").write_text(SAYS.format(code=3))
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, writer = os.pipe()
    os.write(writer, b"beside it")
    with theirs:
        words = [sys.executable, "-P", str(PROGRAM), "no_such_module"]
        process = subprocess.Popen(words, stdin=theirs.fileno())
    environment = {"OWN": "its own", "PYTHONPATH": str(tmp_path)}
    order = {"words": ["-P", "-m", "said", "a"] if is_module else [str(tmp_path / "said.py"), "a"]}
    order |= {"folder": str(tmp_path), "environment": environment, "numbers": [7]}  # type: ignore[dict-item, list-item]
    with (tmp_path / "log").open("wb") as log, own, its_own, line:
        own.settimeout(LIMIT_S)
        files = [0, log.fileno(), log.fileno(), reader, its_own.fileno()]
        socket.send_fds(line, [json.dumps({**order, "apart": is_apart}).encode()], files)
        its_own.close()
        pid = int(own.recv(32))
        wait_for_end(pid)
        if is_apart:  # whoever adopts orphans has its exit code
            assert not own.recv(32)
        else:
            own.send(b"?")
            assert own.recv(32) == b"3"
    assert process.wait(LIMIT_S) == 0
    said = (tmp_path / "log").read_text()
    assert "'a'] its own b'beside it'" in said
