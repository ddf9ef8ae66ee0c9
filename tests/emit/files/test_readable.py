"""Files that can be read: short, with a picture, and loops that are exactly the steps."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bigbrain_fx.core import Backward, Cluster, Device, Edge, Forward, Link, Program, Stage, Stages
from bigbrain_fx.emit.files.schedule_text import MicroAction, MicroLoop, roll, unroll
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.plan.schedule import StageCosts, build
from models.gpt import GPT
from tests.support import samples
from tests.support.examples import examples
from tests.support.samples import Sample

LINES = 250  # of a device file, at most
MICRO = (8, 64)
COLUMNS = 100
MODELS = samples.cases(("gpt", "unet", "encdec", "resnet", "llama", "moe"))


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


@lru_cache(maxsize=2)
def gpt(blocks: int) -> Sample:
    """Capture a narrow GPT; 64 rows, so that 64 micro-batches divide them."""
    module = GPT(blocks=blocks, dim=8, heads=2, sequence=8, vocabulary=16)
    tokens = torch.zeros(64, 8, dtype=torch.long)
    return samples.of_module(module, {"tokens": tokens, "targets": tokens}, loss)


@lru_cache(maxsize=16)
def device_lines(blocks: int, partitioner: str, schedule: str, micro_batches: int) -> list[int]:
    plan = samples.planned(gpt(blocks), partitioner, 4, schedule, micro_batches)
    texts = bundle_texts(plan)
    return [texts[f"device_d{i}.py"].count("\n") for i in range(4)]


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("partitioner", ["naive", "chain-dp"])
@pytest.mark.parametrize("blocks", [8, 12, 24])
def test_many_blocks_on_4_devices(blocks: int, partitioner: str, schedule: str) -> None:
    few, many = (device_lines(blocks, partitioner, schedule, count) for count in MICRO)
    assert max(*few, *many) < LINES
    if partitioner == "naive":  # chain-dp cuts anew for each number: in a block, where that pays
        assert few == many
    twice = device_lines(2 * blocks, partitioner, schedule, MICRO[0])
    assert all(abs(a - b) <= 10 for a, b in zip(few, twice, strict=True)), (few, twice)


@pytest.mark.parametrize("model", MODELS)
def test_few_lines_are_too_long(model: str) -> None:
    """Only what has no bracket to break at, or a trailing comment, may go past the edge."""
    for name, text in samples.texts(model).items():
        if name.startswith("device_"):
            code = [line.partition("  # ")[0] for line in text.splitlines()]
            long = [line for line in code if len(line) > COLUMNS]
            assert len(long) <= 2, (name, long)


@pytest.mark.nightly
def test_layers_are_one_class_in_a_loop() -> None:
    texts = bundle_texts(samples.planned(gpt(16), "naive", 4, "1f1b", 8))
    assert texts["model_blocks.py"].count("class Block(") == 1  # of all devices
    for number in (1, 2):
        text = texts[f"device_d{number}.py"]
        assert text.count("        for i in range(") + text.count("        for block in ") == 1
    assert "# gpt.py:" in texts["device_d0.py"]


# --------------------------------------------------------------------------- as a person writes

NUMBERED = 0.2  # share of local names that end in a number of ours


def device_files(model: str) -> list[str]:
    """Return what each device runs: its file, with the classes that it shares with others."""
    texts = samples.texts(model)
    shared = texts.get("model_blocks.py", "")
    own = [text for name, text in texts.items() if name.startswith("device_")]
    return [text + shared if "model_blocks" in text else text for text in own]


def forwards(text: str) -> list[ast.FunctionDef]:
    """Return the forwards of blocks and stages."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [
        node
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    ]


def stored(function: ast.FunctionDef) -> set[str]:
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_computed_in_vain(model: str) -> None:
    """Every variable of a forward is read, every argument too; nothing is imported in vain."""
    for text in device_files(model):
        for function in forwards(text):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            given = {argument.arg for argument in function.args.args}
            assert stored(function) - read <= {"_"}, ast.unparse(function)
            assert given - read <= {"self"}, ast.unparse(function)


@pytest.mark.parametrize("model", MODELS)
def test_names_are_words(model: str) -> None:
    """`x_2` beside `x` is a number of ours; `down_0` is what `self.down[0]` gives."""
    found = [stored(function) for text in device_files(model) for function in forwards(text)]
    names = [name for each in found for name in each]
    numbered = [n for each in found for n in each if re.sub(r"_\d+$", "", n) in each - {n}]
    assert len(numbered) <= NUMBERED * len(names), sorted(numbered)
    for text in device_files(model):
        assert "_guards" not in text
        assert "_tensor_constant" not in text
        assert "getattr(self." not in text


@pytest.mark.parametrize("model", MODELS)
def test_classes_have_the_names_of_the_model(model: str) -> None:
    tree = ast.parse((samples.ROOT / "models" / f"{model}.py").read_text())
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for text in device_files(model):
        found = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        blocks = {re.sub(r"_\d+$", "", n) for n in found if not re.match(r"Stage\d|DeviceD\d", n)}
        assert blocks <= own


def chain(text: str) -> list[str]:
    """Return the devices of a file's picture; its own stands in brackets."""
    paragraph = text.split("\n\n")[1]
    return re.findall(r"\[?d\d+\]?(?= -->|     |\n|$)", paragraph)


@pytest.mark.parametrize(
    ("devices", "schedule", "expected"),
    [
        (2, "1f1b", ["d0", "[d1]"]),
        (2, "zb-v", ["d0", "[d1]", "d0"]),
        (4, "zb-v", ["d0", "[d1]", "d2", "d3", "d2", "[d1]", "d0"]),
        (2, "interleaved", ["d0", "[d1]", "d0", "[d1]"]),
    ],
)
def test_a_device_is_drawn_once_per_visit(devices: int, schedule: str, expected: list[str]) -> None:
    texts = samples.texts("gpt", "naive", devices, schedule, 4)
    assert chain(texts["device_d1.py"]) == expected


def test_a_long_chain_is_wrapped() -> None:
    plan = samples.plan("gpt", "scattered")
    text = samples.texts("gpt", "scattered")["device_d0.py"]
    visits = [name for name, _ in groupby(stage.device for stage in plan.stages.stages)]
    assert chain(text) == [f"[{name}]" if name == "d0" else name for name in visits]
    paragraph = text.split("\n\n")[1]
    assert len(paragraph.splitlines()) > 1
    assert all(len(line) <= COLUMNS for line in paragraph.splitlines())


# --------------------------------------------------------------------------- loops


def steps_of(word: str) -> list[MicroAction]:
    """Read "F0 B0 F1" as steps."""
    return [MicroAction(cell[0], int(cell[1:])) for cell in word.split()]


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            MicroLoop,
            st.lists(
                st.builds(MicroAction, st.sampled_from("FGB"), st.integers(0, 3)),
                min_size=1,
                max_size=4,
            ).map(tuple),
            st.integers(1, 9),
        ),
        max_size=5,
    )
)
def test_rolling_never_needs_more_statements_than_steps(loops: list[MicroLoop]) -> None:
    steps = unroll(loops)
    rolled = roll(steps)
    assert unroll(rolled) == steps
    assert sum(len(loop.body) for loop in rolled) <= len(steps)


def looped(count: int) -> tuple[Stages, StageCosts]:
    stages = tuple(Stage(i, f"d{i}", ()) for i in range(count))
    edges = [Edge(f"v{i}", i, i + 1, "activation", 4) for i in range(count - 1)]
    back = [Edge(f"v{i}", i + 1, i, "gradient", 4) for i in range(count - 1)]
    devices = tuple(Device(f"d{i}", "h", "cpu", 1 << 30, 1.0, 1.0) for i in range(count))
    ones = (1.0,) * count
    costs = StageCosts(ones, ones, (1,) * count, Cluster(devices, Link(0.0, 1.0)))
    return Stages(stages, (*edges, *back)), costs


def rolled(schedule: str, count: int, micro_batches: int, stage: int) -> list[MicroLoop]:
    stages, costs = looped(count)
    trained = frozenset(range(count))
    programs = build(schedule, stages, micro_batches, costs, trained)
    steps = computed(programs[stage])
    loops = roll(steps)
    assert unroll(loops) == steps
    return loops


def computed(program: Program) -> list[MicroAction]:
    return [
        MicroAction("F" if isinstance(i, Forward) else "B", i.micro)
        for i in program.instructions
        if isinstance(i, Forward | Backward)
    ]


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"),
    [
        ("gpipe", 0, "8 x (F0); 8 x (B0)"),
        ("gpipe", 3, "8 x (F0); 8 x (B0)"),
        ("1f1b", 0, "4 x (F0); 4 x (B0 F4); 4 x (B4)"),
        ("1f1b", 1, "3 x (F0); 5 x (B0 F3); 3 x (B5)"),
        ("1f1b", 2, "2 x (F0); 6 x (B0 F2); 2 x (B6)"),
        ("1f1b", 3, "8 x (F0 B0)"),
    ],
)
def test_a_schedule_is_few_loops(schedule: str, stage: int, expected: str) -> None:
    """The loops cover the same steps in the same order, however a stage's warm-up is written."""
    loops = rolled(schedule, 4, 8, stage)
    assert unroll(loops) == unroll(parsed(expected))
    assert sum(len(loop.body) for loop in loops) <= 5


def parsed(text: str) -> list[MicroLoop]:
    loops = []
    for part in text.split("; "):
        count, _, body = part.partition(" x ")
        loops.append(MicroLoop(tuple(steps_of(body.strip("()"))), int(count)))
    return loops
