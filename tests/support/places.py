"""The places where a room of the product calls the system, found by reading its files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "bigbrain_fx"
FUNCTIONS = frozenset({"open", "print", "safe_open", "load_file", "save_file"})
MODULES = {
    "fcntl": {"flock", "ioctl"},
    "mmap": {"mmap"},
    "os": {
        *(
            "access",
            "dup",
            "dup2",
            "fstat",
            "fsync",
            "ftruncate",
            "kill",
            "killpg",
            "link",
            "listdir",
        ),
        *("memfd_create", "mkdir", "mkfifo", "open", "pidfd_open", "pipe", "posix_fallocate"),
        *("preadv", "pwrite", "pwritev", "read", "remove", "rename", "replace", "rmdir", "scandir"),
        *("sendfile", "set_blocking", "stat", "statvfs", "symlink", "truncate", "unlink", "waitid"),
        *("waitpid", "write", "writev", "fork", "posix_spawn", "makedirs", "fdopen"),
    },
    "select": {"select", "poll", "epoll"},
    "selectors": {"DefaultSelector"},
    "shutil": {"copy", "copyfile", "copytree", "move", "rmtree", "disk_usage"},
    "signal": {"pidfd_send_signal"},
    "socket": {
        *("socket", "create_connection", "create_server", "socketpair", "recv_fds", "send_fds"),
        *("if_nameindex", "getaddrinfo", "fromfd"),
    },
    "ssl": {"SSLContext"},
    "subprocess": {"Popen", "run", "check_call", "check_output"},
    "tempfile": {"mkdtemp", "mkstemp", "TemporaryFile", "TemporaryDirectory", "NamedTemporaryFile"},
}
METHODS = frozenset(
    {
        *("accept", "bind", "listen", "sendall", "sendmsg", "recvmsg", "recv_into", "do_handshake"),
        *("load_cert_chain", "load_verify_locations", "read_bytes", "read_text", "write_bytes"),
        *("write_text", "mkdir", "rmdir", "unlink", "touch", "iterdir", "glob", "rename", "stat"),
        *("symlink_to", "open", "is_dir", "is_file", "exists", "is_symlink", "fsync", "modify"),
    }
)
OF_OBJECTS = {  # methods of such names are of others, too
    "connect": {"way"},
    "recv": {"line", "connection", "bell"},
    "send": {"line", "button", "connection", "lines"},
    "register": {"selector", "looked", "waiter"},
    "select": {"selector"},
    "start": {"thread", "listener", "Thread"},
    "submit": {"pool"},
    "write": {"stream", "file", "stderr", "tls", "stdin", "in"},
    "read": {"file", "tls", "out"},
}


def places(room: str) -> Iterator[str]:
    """Yield each place of a room: file, function, and the call that it makes there."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for function, call in _calls(ast.parse(path.read_text()), ""):
            yield f"{path.relative_to(ROOT / room)} {function or '-'} {call}"


def lines_of(room: str, file: str, function: str) -> Iterator[int]:
    """Yield the lines of all functions of a name in a file of a room."""
    for node in ast.walk(ast.parse((ROOT / room / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = child.name
        if isinstance(child, ast.Call) and (name := _of_system(child.func)) is not None:
            yield inner, name
        yield from _calls(child, inner)


def _of_system(called: ast.expr) -> str | None:
    """Return how a call to the system is named here; None: it is none."""
    if isinstance(called, ast.Name):
        return called.id if called.id in FUNCTIONS else None
    if not isinstance(called, ast.Attribute):
        return None
    owner, name = _last_name(called.value), called.attr
    if owner in MODULES:
        return f"{owner}.{name}" if name in MODULES[owner] else None
    if name in METHODS or owner.strip("_") in OF_OBJECTS.get(name, ()):
        return f".{name}"
    return None


def _last_name(owner: ast.expr) -> str:
    """Return the last name of what a method is called of."""
    if isinstance(owner, ast.Call | ast.Subscript):
        return _last_name(owner.func if isinstance(owner, ast.Call) else owner.value)
    if isinstance(owner, ast.Attribute):
        return owner.attr
    return owner.id if isinstance(owner, ast.Name) else ""
