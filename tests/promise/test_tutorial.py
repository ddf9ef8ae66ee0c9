"""Tutorials and the page on renting, typed by the letter."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import free_port
from bigbrain_fx.cli.templates import CLUSTER, example
from tests.promise.conftest import typed_in_bash

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs/tutorials"
PAGE = TUTORIALS / "first-split.md"
OWN = TUTORIALS / "your-own-training-script.md"
TWO = TUTORIALS / "two-machines.md"


def commands(page: Path = PAGE) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S))


def typed(page: Path, folder: Path) -> str:
    """Type the commands of a page in a folder; return what they print."""
    return typed_in_bash(f"set -x\n{commands(page)}", folder)


@pytest.mark.nightly
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    printed = typed(PAGE, tmp_path)
    for line in ("reference = bundle, weights: 31 tensors after 5 steps bitwise",
                 "d1 was killed by signal 9", "<All keys matched successfully>"):  # fmt: skip
        assert line in printed
    written = [len(path.read_text().splitlines()) for path in device_files(tmp_path / "bundle")]
    assert f"{written[0]} and {written[1]} lines" in PAGE.read_text()


@pytest.mark.nightly
def test_a_training_script_becomes_a_model_file(tmp_path: Path) -> None:
    files = re.findall(r"^```python\n(.*?)^```$", OWN.read_text(), re.M | re.S)
    for name, text in zip(("classify.py", "model.py", "check.py"), files, strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "cluster.json").write_text(CLUSTER)
    printed = typed(OWN, tmp_path)
    for line in ("step   319   loss 0.002108", "validation at step 320: accuracy 0.861328"):
        assert line in printed


@pytest.mark.nightly
def test_two_addresses_train_as_two_machines(tmp_path: Path) -> None:
    text = TWO.read_text()
    (cluster,) = re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)
    (secret,) = re.findall(r"^\(umask.*$", text, re.M)
    first, second = (re.findall(rf"^127.0.0.{n}\$ (.*)$", text, re.M)[0] for n in (1, 2))
    (tmp_path / "model.py").write_text(example("bytes"))
    (tmp_path / "cluster.json").write_text(cluster)
    port = str(free_port())
    script = f"""
bigbrain-fx split model.py --devices cluster.json --with hosts --out bundle
bigbrain-fx run bundle --steps 20 --save saved
(cd bundle; {secret})
cp -r bundle second
(cd second; {second}) &
(cd bundle; {first})
wait %1
ls bundle/saved/d0.safetensors second/saved/d1.safetensors
"""
    printed = typed_in_bash(f"set -x\n{script}".replace(":29500", f":{port}"), tmp_path)
    for line in re.findall(r"^127.*$", text, re.M):
        assert line.replace(":29500", f":{port}") in printed.replace(":29500", f":{port}")
    assert "step    19" in printed


def device_files(bundle: Path) -> list[Path]:
    return sorted(bundle.glob("device_*.py"))


def test_the_tutorial_has_commands() -> None:
    assert commands().count("bigbrain-fx ") >= 9


RENT = (ROOT / "docs/how-to/rent.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^## ([^\n]*)\n.*?^```sh\n(.*?)^```", RENT, re.M | re.S)
PROCESSOR_S = {"LoRA": 60.0}  # 80 layers are traced; of other questions 30 s


def used_s() -> float:
    """Return the processor seconds of all processes that were started and have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "script"), QUESTIONS, ids=[name for name, _ in QUESTIONS])
def test_a_question_of_the_page_is_answered(name: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    *files, command = script.rstrip().split("\nbigbrain-fx ")
    typed_in_bash("\n".join(files), tmp_path, OMP_NUM_THREADS="1")
    begun_s = used_s()
    said = typed_in_bash(f"bigbrain-fx {command}", tmp_path, OMP_NUM_THREADS="1")
    for word in (" tokens/s", "money: ", " USD a million tokens", "better: "):
        assert word in said
    assert used_s() - begun_s < PROCESSOR_S.get(name.split()[0], 30.0)


def test_the_page_asks_three_questions() -> None:
    assert len(QUESTIONS) == 3
