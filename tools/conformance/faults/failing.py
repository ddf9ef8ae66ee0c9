# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202, ANN204  # it patches what has its types elsewhere
"""Lets every call that a device's runtime makes to the system fail, each once in a run.

They fail once the run is under way, when a first device was killed: so what replaces it meets them,
too, as it starts. The places are found, not listed: a call, and the line of runtime/ that makes it.
Those that have failed lie in a folder, a file for each: a run after this one goes on with the rest.

This file is copied into a bundle as failing.py, and its train.py imports it first.
"""

import builtins
import errno
import fcntl
import io
import mmap
import os
import pathlib
import select
import socket
import sys
import threading

import safetensors
import torch.distributed as dist

RUNTIME = str(pathlib.Path(__file__).resolve().parent / "runtime") + os.sep
LIBRARY = os.path.dirname(os.__file__) + os.sep
PASSED_THROUGH = (
    *(LIBRARY + name for name in ("pathlib", "threading", "concurrent", "socket", "contextlib")),
    os.path.dirname(safetensors.__file__),
    __file__,
)
FOLDER = pathlib.Path(os.environ["BIGBRAIN_FAILING"])
EACH = 1 + int(os.environ.get("BIGBRAIN_FAILING_NTH", "0"))  # of a place's calls in a process
UNDER_WAY = os.path.join(os.path.dirname(__file__), "faults", "struck-0")
SHORT = -1  # of a write: half of it is written
DISK = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS)
LINE = (errno.ENOMEM, errno.ENOBUFS, errno.EPIPE)
KINDS = {
    "open": DISK,
    "write": (errno.ENOSPC, SHORT, errno.EIO, errno.EPIPE),
    "look": (errno.EIO, errno.ESTALE, errno.EACCES),
    "send": LINE,
    "receive": (errno.ENOMEM, errno.ECONNRESET),
    "select": (errno.ENOMEM,),
    "dup": (errno.EMFILE,),
    "map": (errno.ENOMEM,),
    "thread": (errno.EAGAIN,),
    "connect": (errno.EMFILE, errno.ENOMEM),
}
calls = {}  # of this process: place -> how many
here = threading.local()  # whether this thread is in what follows
write_out, make, read_names, is_there = os.write, os.open, os.listdir, os.path.exists


def place_of(name):
    """Return the place that makes a call: the nearest line of the runtime, if it does it itself."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(RUNTIME):
            return f"{name} {file[len(RUNTIME) :]}:{frame.f_lineno}"
        if not file.startswith(PASSED_THROUGH) or "importlib" in file:
            return None  # it is somebody else's
        frame = frame.f_back
    return None


def due(name, kind):
    """Return the error with which a call fails now; None: it does not."""
    if getattr(here, "busy", False):
        return None
    here.busy = True
    try:
        if not is_there(UNDER_WAY):
            return None
        place = place_of(name)
        if place is None:
            return None
        calls[place] = calls.get(place, 0) + 1
        if calls[place] != EACH:
            return None
        number = len(read_names(FOLDER))
        mark = FOLDER / place.replace(os.sep, "_")
        try:
            os.close(make(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        errors = KINDS[kind]
        found = errors[number % len(errors)]
        what = "SHORT" if found == SHORT else errno.errorcode[found]
        write_out(2, f"failing: {place} with {what}\n".encode())
        return found
    finally:
        here.busy = False


def failing(name, whole, kind, error=OSError):
    """Return a call that fails once at each place."""

    def call(*args, **kwargs):
        found = due(name, kind)
        if found is None:
            return whole(*args, **kwargs)
        if found == SHORT:
            return whole(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
        if error is RuntimeError:
            raise RuntimeError(os.strerror(found))
        raise OSError(found, os.strerror(found))

    return call


class Writes:
    """A file whose writes fail, too, half way."""

    def __init__(self, file):
        self.file = file

    def write(self, piece):
        """Write it, or half of it."""
        found = due("write", "open")
        if found is None:
            return self.file.write(piece)
        self.file.write(bytes(piece)[: len(piece) // 2])
        self.file.flush()
        raise OSError(found, os.strerror(found))

    def __enter__(self):
        """Go in."""
        self.file.__enter__()
        return self

    def __exit__(self, *raised):
        """Go out."""
        return self.file.__exit__(*raised)

    def __getattr__(self, name):
        """Be the file otherwise."""
        return getattr(self.file, name)


def opening(whole):
    """Return `open` that fails once at each place, and so do writes to what it opens."""
    opened = failing("open", whole, "open")

    def call(file, mode="r", *args, **kwargs):
        found = opened(file, mode, *args, **kwargs)
        return Writes(found) if mode == "wb" else found

    return call


for _name in ("open", "fsync", "replace", "mkdir", "rmdir", "unlink", "scandir", "link"):
    setattr(os, _name, failing(_name, getattr(os, _name), "open"))
for _name in ("stat", "lstat", "listdir", "access"):
    setattr(os, _name, failing(_name, getattr(os, _name), "look"))
for _name in ("fstat", "posix_fallocate", "preadv"):
    setattr(os, _name, failing(_name, getattr(os, _name), "map"))
for _name in ("dup", "dup2"):
    setattr(os, _name, failing(_name, getattr(os, _name), "dup"))
os.write = failing("os.write", os.write, "write")
fcntl.flock = failing("flock", fcntl.flock, "open")
os.ftruncate = failing("ftruncate", os.ftruncate, "map")
mmap.mmap = failing("mmap", mmap.mmap, "map")
select.select = failing("select", select.select, "select")
builtins.open = opening(builtins.open)
io.open = opening(io.open)
socket.recv_fds = failing("recv_fds", socket.recv_fds, "receive")
socket.socket.sendall = failing("sendall", socket.socket.sendall, "send")
threading.Thread.start = failing("thread", threading.Thread.start, "thread", RuntimeError)
safetensors.safe_open = failing("safe_open", safetensors.safe_open, "open")
dist.ProcessGroupGloo.create_device = failing(
    "create_device", dist.ProcessGroupGloo.create_device, "connect", RuntimeError
)
dist.ProcessGroupGloo = type(
    "Failing",
    (),
    {
        "__new__": failing(
            "connect", lambda _, *a, w=dist.ProcessGroupGloo: w(*a), "connect", RuntimeError
        ),
        "_Options": dist.ProcessGroupGloo._Options,
        "create_device": dist.ProcessGroupGloo.create_device,
    },
)
