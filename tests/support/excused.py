"""Places that call the system and are not struck in runs of a tiny bundle, by the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def excused(reasons: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the reason by place."""
    return {place: reason for reason, places in reasons.items() for place in places}


RUNTIME = excused(
    {
        "of an older Python, which ends there: test_beginning": ("__init__.py - .write",),
        "failed, every one, in test_every_call_fails": (
            "checkpoint_store.py prepare .exists",
            "checkpoint_store.py prepare .is_dir",
            "checkpoint_store.py prepare .mkdir",
            "checkpoint_store.py warn_of_others .stat",
            "checkpoints.py begin_together .submit",
        ),
        "a call of this room's own, whose call to the system is struck": (
            "disk.py put .rename",
            "disk.py keep .rename",
            "tensor_file.py put .rename",
            "tensor_file.py take_back .rename",
        ),
        "only where a run saves over another's files: test_saving": ("disk.py keep os.link",),
        "only where hosts have folders of their own; OSError is heard by the caller": (
            "checkpoint_store.py _drop .is_dir",
            "checkpoint_store.py _drop .is_symlink",
            "checkpoint_store.py _drop .iterdir",
        ),
        "prints, which `let_prints_be_lost` or `show` let be lost": (
            "control.py fail print",
            "peers.py blaming_peers print",
            "limits.py _let_go open",
            "limits.py _let_go os.dup2",
            "limits.py show print",
        ),
        "before the run is under way, or of no supervised process": (
            "__init__.py _homes .read_text",
            "control.py inherited socket.socket",
            "launcher.py _is_there os.kill",
            "local.py run .start",
            "rendezvous.py _interface_to .connect",
            "rendezvous.py _interface_to fcntl.ioctl",
            "mesh.py _gloo_device socket.if_nameindex",
            "rendezvous.py _interface_to socket.if_nameindex",
            "rendezvous.py _interface_to socket.socket",
            "rendezvous.py _tcp_store .bind",
            "rendezvous.py _tcp_store .listen",
            "rendezvous.py _tcp_store socket.socket",
            "train.py main .is_file",
        ),
        "a module's own function, and no socket": ("member.py _listen .listen",),
        "reads what was opened there, which is struck": ("disk.py read_regular .read",),
        "of files that a user gives, with tests of their own (inputs, checkpoints, resplit)": (
            "compiler.py require_compiler .is_file",
            "checkpoint_store.py load .open",
            "checkpoint_store.py load mmap.mmap",
            "checkpoint_store.py to_resume .exists",
            "checkpoint_store.py to_resume .is_dir",
            "plain.py _read safe_open",
            "rows.py _opened safe_open",
        ),
        "of offloaded bundles: tests/runtime/test_stores.py and tests/supervisor/test_stores.py": (
            "stores.py _folder .is_dir",
            "stores.py _nameless os.dup",
            "stores.py _nameless tempfile.TemporaryFile",
            "stores.py _reserve os.posix_fallocate",
            "stores.py _reserve os.statvfs",
            "stores.py buffer mmap.mmap",
            "stores.py read os.preadv",
            "stores.py take mmap.mmap",
        ),
        "of --suspect, sessions and serving, which have tests of their own": (
            "feeding.py _read mmap.mmap",
            "serving.py _read os.read",
            "serving.py _write os.write",
            "suspicion.py _write mmap.mmap",
            "suspicion.py _write os.fstat",
            "suspicion.py _write os.ftruncate",
            "suspicion.py check mmap.mmap",
        ),
        "only where a snapshot grows: tests/supervisor/test_snapshots.py": (
            "snapshots.py _make_room os.ftruncate",
            "snapshots.py _make_room os.posix_fallocate",
        ),
    }
)
SUPERVISOR = excused(
    {
        "of a device that is a new Python; these runs fork theirs (`launch.warm`)": (
            "processes.py _has_ended os.waitid",
        ),
        "between hosts: test_hosts, test_silence and test_failing_lines": (
            "admission.py _open .accept",
            "admission.py _open .start",
            "multi_host.py _door socket.create_server",
            "multi_host.py _reached socket.create_connection",
            "hosts.py __init__ .start",
            "hosts.py __init__ selectors.DefaultSelector",
            "hosts.py __init__ socket.socketpair",
            "hosts.py _begin .register",
            "hosts.py _forward socket.recv_fds",
            "hosts.py _hear .recv",
            "hosts.py _listen .send",
            "hosts.py _obey .recv",
            "hosts.py _pass_on .send",
            "hosts.py _require_ours .is_file",
            "hosts.py _turn .select",
            "hosts.py run .register",
            "hosts.py run .start",
            "hosts.py start .start",
            "hosts.py start os.dup",
            "hosts.py start socket.socket",
            "host.py _fits .bind",
            "processes.py end_of os.dup",
            "remaining.py __init__ os.pipe",
            "secured.py __init__ .read_text",
            "secured.py __init__ .start",
            "secured.py __init__ .stat",
            "secured.py _context .load_cert_chain",
            "secured.py _context .load_verify_locations",
            "secured.py _context ssl.SSLContext",
            "secured.py _find_end .read",
            "secured.py _has_shaken_hands .do_handshake",
            "secured.py _has_shaken_hands .read",
            "secured.py _has_shaken_hands .sendall",
            "secured.py _more .recv",
            "secured.py _more .register",
            "secured.py _more .write",
            "secured.py _more select.poll",
            "secured.py is_gone socket.create_connection",
            "secured.py say .read",
            "secured.py say .sendall",
            "secured.py say .write",
        ),
        "of an older Python, which ends there: test_beginning": ("__init__.py - .write",),
        "of launch.py alone: test_listeners, test_failing_lines, test_limits": (
            "command.py _run .write",
            "command.py last_lines .open",
            "command.py last_lines .read",
            "command.py last_lines .stat",
            "command.py _logs .mkdir",
            "arguments.py require_parts .is_file",
            "policies.py - .is_file",
            "arguments.py _folder .is_dir",
            "command.py _logs tempfile.mkdtemp",
            "aside.py _write .write",
            "aside.py _write os.write",
            "aside.py _write select.select",
            "console.py say os.write",
            "console.py hold_streams open",
            "console.py hold_streams os.open",
            "console.py warn print",
        ),
        "a process of its own, without which another is started: test_outliving": (
            "outliving.py main os.killpg",
        ),
        "only when asked to stop": (
            "crew.py _ring .recv",
            "crew.py wake .send",
        ),
        "only where a socket is full: test_failing_lines": ("crew.py _watch_room .modify",),
        "of sessions, which have tests of their own": (
            "feeding.py _written os.write",
            "feeding.py look os.dup",
        ),
        "only where snapshots lie on a disk, or the kernel has no memfd": (
            "snapshots.py nameless os.dup",
            "snapshots.py nameless tempfile.TemporaryFile",
        ),
        "beside a file that is read there, which is struck": (
            "host_memory.py text_of .read",
            "starving.py _waited_ns .iterdir",
            "starving.py _waited_ns .read_text",
            "starving.py is_stopped .iterdir",
            "starving.py is_stopped .read_text",
        ),
    }
)
