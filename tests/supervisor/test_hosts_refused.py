"""Certificates of a run over hosts, and hosts that cannot join."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.supervisor import main
from bigbrain_fx.supervisor.secured import (
    Pair,
    StrangerError,
    how_to_make,
)
from tests.support.certificates import make

HOSTS = ("north", "south", "north")

NAMES = ("d0", "d1", "d2")


def test_the_file_is_its_owners_only_and_holds_both(tmp_path: Path) -> None:
    file = make(tmp_path / "my secret")
    assert file.stat().st_mode & 0o077 == 0
    assert Pair(file).certificate == Pair(file).certificate
    text = file.read_text()
    file.chmod(0o644)
    with pytest.raises(StrangerError, match="chmod 600"):
        Pair(file)
    key, certificate = text[: text.index("-----BEGIN CERT")], text[text.index("-----BEGIN CERT") :]
    another = make(tmp_path / "another").read_text()
    mixed = another[: another.index("-----BEGIN CERT")] + certificate
    wrong = ["sixteen letters or more", key, certificate, text[:300], "", mixed]
    for content in (*wrong, text.replace("A", "B")):
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(StrangerError, match=r"anew, for all hosts: \(umask 077; openssl"):
            Pair(file)
    words = f"pkcs8 -topk8 -in {tmp_path}/another -passout pass:word -out {tmp_path}/sealed"
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True, timeout=60)
    sealed = tmp_path / "sealed"  # it must not ask at the terminal
    sealed.write_text(sealed.read_text() + another[another.index("-----BEGIN CERT") :])
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name in ("sealed", "pipe", "folder"):
        (tmp_path / name).chmod(0o700)
        with pytest.raises(StrangerError, match="is not a certificate with its key"):
            Pair(tmp_path / name)
    with pytest.raises(StrangerError, match="is not there: make it anew"):
        Pair(tmp_path / "nothing")


def test_a_missing_openssl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert how_to_make("secret").endswith("(openssl is not here: type it where it is)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--join a:1 --secret s", "--join needs --host NAME"),
        (
            "--join a:1 --secret s --host east",
            "--host is one of south, found 'east': north listens",
        ),
        ("--join a:1 --secret s --host north", "--host is one of south, found 'north'"),
        ("--join a:1 --host south", "several hosts need --secret FILE"),
        ("--join a:99999 --secret {pair} --host south", "expected HOST:PORT after --listen or"),
        ("--join no.host.invalid:1 --secret {pair} --host south", "--join takes the first host's"),
    ],
)
def test_a_host_that_cannot_join_is_told_why(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = words.format(pair=make(tmp_path / "pair")).split()
    monkeypatch.setattr(sys, "argv", ["launch.py", *given, "--logs", str(tmp_path / "logs")])
    with pytest.raises(SystemExit) as ended:
        main(tmp_path, NAMES, "train.py", HOSTS)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
