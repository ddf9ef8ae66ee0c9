"""What is trained: a loss that reaches a parameter, whole rows, dense gradients; else a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.translation.refusals import explain
from tests.support.captured import assert_same
from tests.support.messages import refused


class Gpt(nn.Module):
    """The forward of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.embed(idx))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return torch.randint(16, (8, 5), generator=dice), torch.randint(16, (8, 5), generator=dice)


def second(output: Any, batch: object) -> Any:
    return output[1]


def test_forward_gets_the_targets_that_the_loss_needs() -> None:
    model = Gpt()
    for batch in (tokens(), dict(zip(("idx", "targets"), tokens(), strict=True))):
        found = capture(model, batch, second, loss_needed=True)
        assert_same(model, found, lambda *given: model(*given)[1])


def test_forward_gets_no_more_than_the_loss_leaves() -> None:
    def own(output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output[0].flatten(0, 1), batch[1][:, -1])

    model = Gpt()
    found = capture(model, tokens(), own, loss_needed=True)
    assert_same(model, found, lambda idx, targets: own(model(idx), (idx, targets)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("model", "batch", "loss", "what", "remedy"),
    [
        (Plain(), (torch.randn(8, 4),), None, r"returns a tensor \[B, 4\]", "define loss"),
        (Plain(), (torch.randn(8, 4),), lambda *_: None, "scalar tensor, found None", "return it"),
        (Plain(), (torch.randn(8, 4),), lambda o, _: o, "found shape", "mean"),
        (
            Plain(),
            (torch.randn(8, 4),),
            lambda o, _: o.detach().mean(),
            "has no gradient: no path",
            r"detach",
        ),
        (
            Plain().requires_grad_(False),
            (torch.randn(8, 4),),
            lambda o, _: o.mean(),
            "no parameter requires one",
            "requires_grad",
        ),
    ],
)
def test_a_model_without_a_loss_is_refused(
    model: nn.Module,
    batch: object,
    loss: Callable[[Any, Any], Tensor] | None,
    what: str,
    remedy: str,
) -> None:
    with pytest.raises((InputError, CaptureError), match=what) as caught:
        capture(model, batch, loss, loss_needed=True)
    assert remedy in (caught.value.help or "")
    assert capture(model, batch, training=False, loss_needed=True).graph.ops


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.LazyLinear(8), nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def test_lazy_modules_need_sizes() -> None:
    model = Lazy()
    with pytest.raises(InputError, match=r"up \(LazyLinear\) has no sizes"):
        capture(model, (torch.randn(8, 4),))
    model(torch.randn(8, 4))  # the remedy
    assert_same(model, capture(model, (torch.randn(8, 4),)), model)


@pytest.mark.gate("Embedding")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_at_their_line(kind: type[Any]) -> None:
    def loss(output: Tensor, batch: object) -> Tensor:
        return output.square().mean()

    with refused("BX0190", CaptureError):
        capture(nn.Sequential(kind(16, 8, sparse=True)), tokens()[:1], loss)
    capture(nn.Sequential(kind(16, 8)), tokens()[:1], loss)


def test_a_norm_that_wants_more_rows_than_a_probe_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = (torch.randn(3, 4), torch.randn(3, 4))
    found = capture(model, batch, lambda o, b: (o - b[1]).square().mean())
    assert found.graph.static_batch is None


def test_torchs_words_for_itself_stay_out() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.ones(8, 1)).sum() * int(x.sum())

    with refused("BX0130d", CaptureError) as caught:
        capture(Sized(), (torch.randn(8, 4),))
    assert not any(
        mark in str(caught.value) for mark in ("unhinted", "TORCH_LOGS", "u0 (", "issue")
    )


def test_paths_of_torchs_build_stay_out() -> None:
    """What a warning of an autoencoder's sampled latents showed."""
    built = "/__w/pytorch/build/aten/src/ATen/RegisterComposite_0.cpp:9486: "
    error = explain(RuntimeError(f"{built}SymIntArrayRef expected to contain only integers"))
    assert "cannot follow the model: RuntimeError: SymIntArrayRef expected" in str(error)


def test_a_sparse_buffer_is_refused_by_its_name() -> None:
    class Hops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("adj", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.adj, self.a(x).t()).mean()

    with pytest.raises(InputError, match="adj is a sparse tensor"):
        capture(Hops(), {"x": torch.randn(4, 4)})


class Turned(nn.Module):
    """A complex constant, which Python's numbers make in double precision where that is on."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        self.a, self.joined = nn.Linear(4, 4), joined

    def forward(self, x: Tensor) -> Tensor:
        two = torch.complex(torch.tensor(1.0).double(), torch.tensor(2.0).double())
        turn = two if self.joined else torch.tensor(1 + 2j, dtype=torch.cdouble)
        return (self.a(x).double() * turn).abs().float().mean()


def test_a_constant_that_no_weights_file_holds_is_refused() -> None:
    """Its number would be in a file of weights; joined of real ones it is an op's result."""
    with refused("BX0161", CaptureError) as caught:
        capture(Turned(joined=False), {"x": torch.ones(4, 4)}, loss_needed=True)
    assert caught.value.at
    model = Turned(joined=True)
    assert_same(model, capture(model, {"x": torch.ones(4, 4)}, loss_needed=True), model)


class Aggregate(nn.Module):
    """A layer of a graph network, its adjacency in a plain attribute, or its entries in buffers."""

    def __init__(self, adj: Tensor, *, entries: bool = False) -> None:
        super().__init__()
        self.mix, self.entries, coo = nn.Linear(6, 6), entries, adj.to_sparse_coo().coalesce()
        if entries:
            self.register_buffer("index", coo.indices().clone())
            self.register_buffer("value", coo.values().clone())
        else:
            self.adj = adj

    def forward(self, x: Tensor) -> Tensor:
        if not self.entries:
            return torch.as_tensor(self.mix(torch.sparse.mm(self.adj, x.t()).t()))
        index, value = cast("Tensor", self.index), cast("Tensor", self.value)
        got = torch.zeros_like(x).index_add(1, index[0], x[:, index[1]] * value)
        return torch.as_tensor(self.mix(got))


class Aggregated(nn.Module):
    def __init__(self, layer: Aggregate) -> None:
        super().__init__()
        self.a, self.layer, self.b = nn.Linear(6, 6), layer, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.b(torch.tanh(self.layer(self.a(x))))).mean()


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_attribute_is_refused_with_its_line(layout: str) -> None:
    """It has no `nbytes`, and a buffer may not be sparse either: the help names another way."""
    model = Aggregated(Aggregate(getattr(torch.eye(6), layout)()))
    with refused("BX0199g", CaptureError) as caught:
        capture(model, {"x": torch.ones(4, 6)}, loss_needed=True)
    assert caught.value.at


def test_the_entries_of_a_sparse_matrix_are_buffers() -> None:
    """It is what the help says."""
    model = Aggregated(Aggregate(torch.eye(6).roll(1, 0), entries=True))
    assert_same(model, capture(model, {"x": torch.ones(4, 6)}, loss_needed=True), model)
