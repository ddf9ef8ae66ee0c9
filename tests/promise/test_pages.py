"""The commands of README.md and of the how-to pages, typed block by block in own folders.

Those of tutorials are typed in `test_tutorial`. What is not typed is listed with its reason.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.promise.conftest import typed_in_bash
from tests.support.bundles import MODEL

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/how-to/*.md"))
UNTYPED = (
    "docs/how-to/hugging-face.md",  # a checkpoint and a corpus of one's own
    "docs/how-to/rent.md",  # test_tutorial
)
PAGES = ("README.md", *(page for page in HOW_TO if page not in UNTYPED))
NOT_TYPED = {
    "make ": "sets up an environment, or measures for many minutes",
    "pip ": "installs",
    "bigbrain-fx doctor --hosts": "needs other hosts",
    "bigbrain-fx profile model.py --device cuda:1": "needs a GPU",
    "bigbrain-fx serve": "answers until Ctrl-C: tests/serving/test_serving.py",
    "curl ": "asks that server",
}
EMITTED = ("class ", "output = self", "x = ")  # blocks of device files begin so
INSTEAD = {"--weights checkpoint/ ": "--weights hf/checkpoint/ "}  # one page, two models
ROWS = r"^\| `((?:run bundle|init \.) [^`]*)`"  # commands in tables
CLUSTER = {
    "devices": [
        {
            "name": name,
            "host": "localhost",
            "kind": "cpu",
            "memory": "2GiB",
            "flops": "60GFLOP/s",
            "memory_bandwidth": "12GB/s",
            "price_per_hour_usd": 0.1,
        }
        for name in ("d0", "d1")
    ],
    "links": {"default": {"bandwidth": "2GB/s", "latency": "50us"}},
}
WORKSHOP = """
set -ex
bigbrain-fx split model.py --devices cluster.json --out bundle
bigbrain-fx run bundle --steps 3 --save saved
bigbrain-fx split model.py --mode eval --devices cluster.json --out served
bigbrain-fx export bundle --weights saved --to checkpoint/model.safetensors
bigbrain-fx profile model.py --rows 4 --db theirs.sqlite
cp -r bundle a
python make_files.py
"""
MAKE_FILES = """
import onnx, torch, transformers
from onnx import TensorProto, helper
from safetensors.torch import save_file

save_file({"letters": torch.zeros(8, 5, dtype=torch.long)}, "rows.safetensors")
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("hf/checkpoint")
config.save_pretrained("path/to")
names = ("x", [None, 4]), ("y", [None, 4])
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in names)
weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.5] * 16)
nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
graph = helper.make_graph(nodes, "tiny", [x], [y], [weight])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "model.onnx")
"""
PRELUDES = {  # what the lines around a block of Python have
    "machine.train(": """
import torch
import bigbrain_fx as bb
from itertools import islice
from model import Net, batches, example_batch, loss
model, batch, loader = Net(), example_batch(), list(islice(batches(0), 3))
""",
    "dcp.load(": """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from model import Net
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    "load_optimizer(": """
import safetensors.torch, torch
from load_optimizer import load_optimizer
from model import Net
model = Net()
""",
}
_COMMITTED = "bigbrain-fx run bundle --steps 2 --checkpoint-dir checkpoints\n"
MADE_BEFORE = {  # what other blocks of the page have made, by a word of the block that reads it
    "--freeze": _COMMITTED,
    "load_optimizer(": f"""{_COMMITTED}
bigbrain-fx export bundle --checkpoint-dir checkpoints \\
    --to model.safetensors --optimizer optimizer.safetensors
""",
    "--from-dcp": f"""{_COMMITTED}
bigbrain-fx export bundle --dcp step-900 --checkpoint-dir checkpoints
""",
    "dcp.load(": f"""{_COMMITTED}
bigbrain-fx export bundle --dcp step-600 --checkpoint-dir checkpoints
""",
}


def blocks() -> Iterator[tuple[str, str]]:
    """Yield a name and the text of each block of commands, and of Python."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
            if found[1] in ("", "sh", "python") and "──" not in found[2]:
                line = text[: found.start()].count("\n") + 1
                yield f"{page}:{line}{':python' * (found[1] == 'python')}", found[2]
        rows = re.findall(ROWS, text, re.M)
        if rows:
            yield f"{page}:tables", "".join(f"bigbrain-fx {row}\n" for row in rows)


BLOCKS = {name: text for name, text in blocks() if "bundle/\n" not in text}


def typed(text: str) -> list[str]:
    """Return the lines of a block that are typed."""
    if text.lstrip().startswith(EMITTED):
        return []
    for old, new in INSTEAD.items():
        text = text.replace(old, new)
    lines = [line for line in text.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(tuple(NOT_TYPED))]


def made_first(lines: list[str]) -> Iterator[str]:
    """Yield the folders that a block makes before it reads them: those of the workshop go."""
    read: set[str] = set()
    for line in lines:
        words = re.findall(r"[\w./-]+", line.partition(" #")[0])
        outs = [after for word, after in pairwise(words) if word in ("--out", "-o")]
        if "bigbrain-fx split" in line or "bb.split" in line:
            yield from set(outs or ["bundle"]) - read
        read |= set(words)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the pages take to be there."""
    for package in ("onnx", "transformers"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "model.py").write_text(MODEL)
    (folder / "make_files.py").write_text(MAKE_FILES)
    for name in ("cluster", "other", "new", "a", "b"):
        (folder / f"{name}.json").write_text(json.dumps(CLUSTER))
    design = (ROOT / "docs/how-to/write-a-partitioner.md").read_text(encoding="utf-8")
    (mine,) = re.findall(r"```python\n(from dataclasses.*?)```", design, re.S)
    (folder / "mine.py").write_text(mine)
    (folder / "checkpoint").mkdir()
    typed_in_bash(WORKSHOP, folder, OMP_NUM_THREADS="1")
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", BLOCKS)
def test_commands_of_a_page_can_be_typed(name: str, workshop: Path, tmp_path: Path) -> None:
    lines = typed(BLOCKS[name])
    if not lines:
        return
    folder = shutil.copytree(workshop, tmp_path / "typed", symlinks=True)
    for made in made_first(lines):
        shutil.rmtree(folder / made, ignore_errors=True)
    for word, commands in MADE_BEFORE.items():
        if word in BLOCKS[name]:
            typed_in_bash(f"set -x\n{commands}", folder, OMP_NUM_THREADS="1")
    if not name.endswith(":python"):
        if any("init ." in line for line in lines):  # it makes them
            for file in ("model.py", "cluster.json"):
                (folder / file).unlink()
        typed_in_bash("\n".join(["set -x", *lines]), folder, OMP_NUM_THREADS="1")
        return
    prelude = next((text for word, text in PRELUDES.items() if word in BLOCKS[name]), "")
    body = "\n".join(f"    {line}" for line in (prelude + "\n".join(lines)).splitlines())
    script = f"python - <<'EOF'\nif __name__ == '__main__':\n{body}\nEOF"
    typed_in_bash(script, folder, OMP_NUM_THREADS="1")


def test_the_blocks_of_all_pages_are_found() -> None:
    commands = [line for text in BLOCKS.values() for line in typed(text)]
    assert sum(line.startswith("bigbrain-fx ") for line in commands) >= 40
    left_out = [line for text in BLOCKS.values() for line in text.splitlines()]
    heads = (*NOT_TYPED, *EMITTED)
    assert all(any(line.startswith(head) for line in left_out) for head in heads)
