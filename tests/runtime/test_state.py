"""A device's state by names: what is restored goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import Channel, Device, Stage, Training
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.image import ImageError, read_layout
from bigbrain_fx.runtime.modules import buffer, parameter
from bigbrain_fx.runtime.state import State, StateError, restore, state_of
from tests.support.states import kept_state

ROWS, STEPS = 4, 6
Make = Callable[[Any], torch.optim.Optimizer]


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed + step)
        x, y = torch.randn(2, ROWS, 4, generator=dice).unbind()
        yield {"x": x, "y": y}


class Whole(Stage):
    """Two trained matrices, one vector that only odd batches train, dropout and a counter."""

    returns = ("loss",)
    a: Tensor
    b: Tensor
    seen: Tensor
    scale: Tensor
    frozen: Tensor

    def __init__(self) -> None:
        super().__init__(
            a=(4, 6),
            b=(6, 4),
            rare=(4,),
            frozen=parameter(4, requires_grad=False),
            seen=buffer(4),
            count=buffer(dtype=torch.int64),
        )
        self.register_buffer("scale", torch.empty(4), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.scale.add_(0.125)
        with self.seeded("drop"):
            h = torch.dropout(torch.tanh(x @ self.a), 0.25, train=True)
        out = (h @ self.b) * self.scale + self.frozen + self.seen
        if float(x.sum()) > 0.0:
            out = out + self["rare"]
        return (out - y).pow(2).mean()


class One(Device):
    name = "d0"
    names = ("d0",)
    micro_batches = 2
    stages = {0: Whole}  # noqa: RUF012
    loss = (0, "loss")
    channels: tuple[Channel, ...] = ()

    def step_once(self) -> None:
        for m in range(self.micro_batches):
            self.forward(0, m, x=self.batch("x", m), y=self.batch("y", m))
            self.backward(0, m)
        self.optimizer_step()


class Alone:
    """A transport for a device that sends nothing."""

    def begin_step(self, channels: object) -> None: ...

    def agree(self, what: str, digest: str, device: str) -> None: ...

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        return yes

    def finish(self) -> None: ...


SHAPES = {"a": (4, 6), "b": (6, 4), "rare": (4,), "frozen": (4,), "seen": (4,)}


def weights() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(1)
    found = {name: torch.randn(shape, generator=dice) for name, shape in SHAPES.items()}
    return {**found, "count": torch.tensor(3)}


def device(
    make: Make,
    seed: int = 5,
    lr_scale: Callable[[int], float] | None = None,
    where: str = "cpu",
) -> One:
    at = torch.device(where)
    inputs = {"x": ("x",), "y": ("y",)}
    specs = {name: ("float32", (ROWS, 4)) for name in inputs}
    stream = Stream(batches, seed, inputs, (), 2, at, specs)
    made = One(Alone(), stream, seed, at)  # type: ignore[arg-type]
    made.load(weights(), {"a": "d0", "b": "d0", "rare": "d0"})
    made.modules[0].get_buffer("scale").fill_(1.0)
    made.train_with(Training(make, lr_scale, clip_norm=0.5))
    return made


def run(made: One, first: int, last: int) -> list[float]:
    return [float(made.run_step(step)) for step in range(first, last)]  # type: ignore[arg-type]


def everything(made: One) -> dict[str, object]:
    """Return bytes of every tensor and all facts."""
    state = state_of(made)
    found: dict[str, object] = {n: t.cpu().numpy().tobytes() for n, t in state.tensors.items()}
    return {**found, "facts": state.facts, "step": state.step}


def adafactor_like(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(named, lr=1e-2)


def two_groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in named if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-2},
        ]
    )


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2),
    "adamw foreach": lambda named: torch.optim.AdamW(named, lr=1e-2, foreach=True),
    "adamw fused": lambda named: torch.optim.AdamW(named, lr=1e-2, fused=True),
    "adamw lr tensor": lambda named: torch.optim.AdamW(named, lr=torch.tensor(1e-2)),
    "adam amsgrad": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True),
    "two groups": two_groups,
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2),
    "sgd momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9),
    "sgd nesterov": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-2, momentum=0.5, centered=True),
    "adafactor": adafactor_like,
    "adadelta": lambda named: torch.optim.Adadelta(named),
    "adamax": lambda named: torch.optim.Adamax(named),
    "nadam": lambda named: torch.optim.NAdam(named),
    "radam": lambda named: torch.optim.RAdam(named),
    "asgd": lambda named: torch.optim.ASGD(named),
    "rprop": lambda named: torch.optim.Rprop(named),
}


@pytest.mark.gate("1-sgd nesterov", "3-nadam")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_restored_and_continued_is_the_run_that_was_not_interrupted(name: str, at: int) -> None:
    make = OPTIMIZERS[name]
    scale = None if "groups" in name else lambda step: 1.0 / (1 + step)
    whole = device(make, lr_scale=scale)
    losses = run(whole, 0, STEPS)
    first = device(make, lr_scale=scale)
    run(first, 0, at)
    image = bytearray(state_of(first).nbytes)
    state_of(first).copy_into(image)
    second = device(make, lr_scale=scale)
    second.modules[0].get_buffer("scale").fill_(99.0)
    restore(second, State.from_buffer(image))
    assert everything(second) == everything(first)
    assert run(second, at, STEPS) == losses[at:]
    assert everything(second) == everything(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("flag", ["capturable", "fused", "foreach"])
def test_a_gpu_goes_on_bit_for_bit(flag: str) -> None:
    def make(named: Any) -> torch.optim.Optimizer:
        flags: Any = {flag: True}
        return torch.optim.AdamW(named, lr=1e-2, **flags)

    whole, first, second = (device(make, where="cuda") for _ in range(3))
    losses = run(whole, 0, STEPS)
    run(first, 0, 3)
    restore(second, State.from_buffer(_image(first)))
    assert everything(second) == everything(first)
    assert run(second, 3, STEPS) == losses[3:]
    assert everything(second) == everything(whole)


def test_a_device_goes_back_to_its_own_snapshot() -> None:
    made = device(OPTIMIZERS["adamw"])
    run(made, 0, 2)
    kept = kept_state(state_of(made))
    losses = run(made, 2, 5)
    restore(made, kept)
    assert run(made, 2, 5) == losses


def test_state_that_is_absent_stays_absent() -> None:
    made = device(OPTIMIZERS["sgd momentum"])
    assert state_of(made).facts["optimizer"]["scalars"] == {}
    other = device(OPTIMIZERS["sgd momentum"])
    run(other, 0, 1)
    restore(other, kept_state(state_of(made)))
    assert other.optimizer is not None
    assert not other.optimizer.state


def test_a_state_has_the_names_of_the_model_only() -> None:
    made = device(OPTIMIZERS["adamw"])
    run(made, 0, 1)
    names = set(state_of(made).tensors)
    held = {"parameter:a", "parameter:b", "parameter:rare", "parameter:frozen"}
    held |= {"buffer:seen", "buffer:count", "buffer:scale"}
    trained = {f"optimizer:{key}:{p}" for key in ("exp_avg", "exp_avg_sq") for p in ("a", "b")}
    assert held | trained <= names
    assert "d0" not in str(state_of(made).facts)


def test_an_image_is_a_safetensors_file() -> None:
    from safetensors.torch import load

    made = device(OPTIMIZERS["adamw"])
    run(made, 0, 1)
    image = bytearray(state_of(made).nbytes + 100)
    size = state_of(made).copy_into(image)
    found = load(bytes(image[:size]))
    assert set(found) == set(state_of(made).tensors)
    assert torch.equal(found["parameter:a"], made.parameters["a"])
    assert read_layout(image).facts["step"] == 1


def test_a_tied_parameter_is_stored_once_under_its_canonical_name() -> None:
    class Tied(Stage):
        def __init__(self) -> None:
            super().__init__(head=(4, 4))

    class Two(One):
        stages = {0: Tied}  # noqa: RUF012
        aliases = {"head": "embed"}  # noqa: RUF012

    made = Two(Alone(), device(two_groups).stream, 5, torch.device("cpu"))  # type: ignore[arg-type]
    made.load({"head": torch.zeros(4, 4)}, {"embed": "d0"})
    made.train_with(Training(OPTIMIZERS["sgd"]))
    assert list(state_of(made).tensors) == ["parameter:embed"]


def test_strides_of_the_optimizer_are_kept() -> None:
    made = device(OPTIMIZERS["adamw"])
    run(made, 0, 1)
    assert made.optimizer is not None
    entry = made.optimizer.state[made.parameters["a"]]
    entry["exp_avg"] = entry["exp_avg"].t().contiguous().t()
    state = State.from_buffer(_image(made))
    restore(made, state)
    assert made.optimizer.state[made.parameters["a"]]["exp_avg"].stride() == (1, 4)


def _image(made: One) -> bytearray:
    state = state_of(made)
    image = bytearray(state.nbytes)
    state.copy_into(image)
    return image


# --------------------------------------------------------------------------- refusals


def test_an_optimizer_with_a_closure_is_refused() -> None:
    made = device(lambda named: torch.optim.LBFGS([p for _, p in named]))
    with pytest.raises(StateError, match="LBFGS couples parameters"):
        state_of(made)


def test_flattened_parameters_are_refused() -> None:
    def flat(named: Any) -> torch.optim.Optimizer:
        whole = torch.cat([p.detach().flatten() for _, p in named])
        return torch.optim.SGD([nn.Parameter(whole)], lr=0.1)

    with pytest.raises(StateError, match="fused or flattened into one have no names"):
        state_of(device(flat))


def test_state_of_no_parameter_is_refused() -> None:
    made = device(OPTIMIZERS["sgd"])
    assert made.optimizer is not None
    made.optimizer.state["all"] = {"norm": 1.0}  # type: ignore[index]
    with pytest.raises(StateError, match="keeps state that belongs to none"):
        state_of(made)


def test_within_a_step_there_is_no_state() -> None:
    made = device(OPTIMIZERS["sgd"])
    made.stream.advance(0)
    made.forward(0, 0, x=made.batch("x", 0), y=made.batch("y", 0))
    with pytest.raises(StateError, match="within a step"):
        state_of(made)


REFUSED: dict[str, tuple[Callable[[State], State], str]] = {
    "seed": (lambda s: _fact(s, seed=7), "seed: expected 5, found 7"),
    "micro-batches": (lambda s: _fact(s, micro_batches=3), "micro_batches: expected 2, found 3"),
    "data": (lambda s: _fact(s, inputs={}), "inputs: expected .*, found {}"),
    "missing": (lambda s: _tensor(s, "parameter:a", None), "the state lacks parameter:a"),
    "more": (lambda s: _tensor(s, "parameter:z", torch.ones(1)), "parameter:z, which this device"),
    "shape": (
        lambda s: _tensor(s, "parameter:a", torch.ones(2, 2)),
        r"shape of parameter:a: expected .*4, 6.*, found .*2, 2",
    ),
    "dtype": (
        lambda s: _tensor(s, "buffer:seen", torch.ones(4).double()),
        "dtype of buffer:seen: expected torch.float32, found torch.float64",
    ),
    "optimizer": (
        lambda s: _optimizer(s, {"class": "torch.optim.sgd.SGD"}),
        "optimizer: expected torch.optim.adamw.AdamW, found torch.optim.sgd.SGD",
    ),
    "no optimizer": (lambda s: _fact(s, optimizer=None), "AdamW, found none"),
    "hyperparameters": (
        lambda s: _optimizer(s, {"hyper": [{"base_lr": 0.1, "group": {"lr": 0.1}}]}),
        "hyperparameters of a: expected .*, found",
    ),
    "parameters": (lambda s: _optimizer(s, {"of": {"a": 0, "b": 0}}), "state lacks rare"),
    "grouping": (
        lambda s: _optimizer(
            s,
            {
                "of": {"a": 0, "b": 1, "rare": 0},
                "hyper": [s.facts["optimizer"]["hyper"][0], {"base_lr": 0.1, "group": {}}],
            },
        ),
        "a and b are in one group .* other hyperparameters",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_state_of_another_model_is_refused_and_changes_nothing(change: str) -> None:
    made = device(OPTIMIZERS["adamw"])
    run(made, 0, 2)
    before = everything(made)
    other = device(OPTIMIZERS["adamw"])
    run(other, 0, 3)
    spoil, message = REFUSED[change]
    with pytest.raises(StateError, match=message):
        restore(made, spoil(state_of(other)))
    assert everything(made) == before


def _fact(state: State, **changed: object) -> State:
    return replace(state, facts={**state.facts, **changed})


def _optimizer(state: State, changed: dict[str, object]) -> State:
    return _fact(state, optimizer={**state.facts["optimizer"], **changed})


def _tensor(state: State, name: str, tensor: Tensor | None) -> State:
    tensors = {n: t for n, t in state.tensors.items() if n != name}
    return replace(state, tensors=tensors if tensor is None else {**tensors, name: tensor})


def test_bytes_that_are_no_image_are_refused() -> None:
    image = _image(device(OPTIMIZERS["sgd"]))
    for broken in (b"", bytes(100), image[:9], image[:-1]):
        with pytest.raises(ImageError):
            State.from_buffer(bytearray(broken))
    newer = bytearray(image.replace(b'\\"format\\": 1', b'\\"format\\": 2'))
    with pytest.raises(StateError, match="format: expected 1, found 2"):
        State.from_buffer(newer)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    state = state_of(device(OPTIMIZERS["sgd"]))
    with pytest.raises(StateError, match="the buffer 10"):
        state.copy_into(bytearray(10))
