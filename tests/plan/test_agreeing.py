"""Options that do not go together are refused before a model is captured, and with --like, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.bundles import estimate, split
from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import AUTO, Options, Plan, Source, make_plan, plan_placed, require_options
from bigbrain_fx.plan.replicas.wanted import require_zero
from tests.plan.test_layer_by_layer import layers, with_stores
from tests.support.synthetic import device

PAIR = with_stores(device("d0"), device("d1"))
TWO = Options("naive", micro_batches=4)
CLASHES: tuple[tuple[dict[str, object], str], ...] = (
    ({"asynchronous": "2bw", "offload": ("state",)}, "--offload: versions are in memory"),
    ({"asynchronous": "2bw", "recompute": "all"}, "--recompute yet"),
    ({"asynchronous": "stash", "defer": "all"}, "only gradients of whole backwards"),
    ({"asynchronous": "2bw", "schedule": "gpipe"}, "--schedule gpipe"),
    ({"asynchronous": "2bw", "mode": "eval"}, "inference"),
    ({"asynchronous": "2bw", "in_flight": (1, 1)}, "it has 1F1B's own"),
    ({"compiled": True, "defer": "all"}, "hooks into what autograd keeps"),
    ({"compiled": True, "offload": ("activations",)}, "--offload of weights and activations"),
    ({"compiled": True, "asynchronous": "2bw"}, "does not go with"),
    ({"quantize": "int8", "recompute": "ops"}, "float weights are made again"),
    ({"offload": ("weights",), "recompute": (0,)}, "keeps what other stages save"),
    ({"offload": ("weights",), "schedule": "zb-h1"}, "comes back to each stage"),
    ({"offload": ("weights",), "defer": "all"}, "keeps gradients of weights waiting"),
    ({"offload": ("state",), "mode": "eval"}, "nothing is trained in inference"),
    ({"mode": "eval", "recompute": "all"}, "--recompute is for training"),
    ({"mode": "eval", "defer": "all"}, "--defer is for training"),
    ({"schedule": "zb-v", "pieces": 3}, "cannot have 3 pieces"),
    ({"pieces": 2}, "cannot have 2 pieces"),
)
UNPLACED: tuple[tuple[dict[str, object], str], ...] = (
    ({"partitioner": AUTO, "asynchronous": "2bw"}, "chooses among plans that compute the same"),
    ({"offload": ("weights",), "tensor": 2}, "does not go with tensor groups"),
    ({"offload": ("weights",), "replicas": 2}, "replicas sum gradients in memory"),
    ({"offload": ("state",), "replicas": 2, "zero_stage": 3}, "does not go with --zero 3"),
    ({"asynchronous": "2bw", "replicas": 2}, "stages would sum unlike versions"),
    ({"zero_stage": 1}, "shares among replicas, and this plan has one"),
    ({"zero_stage": 2, "replicas": 2, "sum_order": "replica"}, "keeps no replica's own sum"),
    (
        {"zero_stage": 3, "replicas": 2, "sum_order": "micro", "schedule": "zb-v"},
        "a split backward has more to do later",
    ),
    ({"schedule": "gems", "defer": "all"}, "gems has an order of its own"),
    ({"schedule": "gems", "zero_stage": 1}, "gems has an order of its own"),
    ({"schedule": "interleaved", "pins": (("blocks.0", "d0"),)}, "cuts the line anew"),
    ({"schedule": "zb-v", "cut_at": "blocks"}, "cuts the line itself"),
    ({"cut_at": "blocks"}, "knows nothing of --cut-at"),
)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "auto"])
def test_backwards_that_are_not_split_go_with_zero_3(schedule: str) -> None:
    whole = asked(
        {"zero_stage": 3, "replicas": 2, "sum_order": "micro", "schedule": schedule, "defer": ()}
    )
    require_zero(whole)
    with pytest.raises(InputError, match="a split backward has more to do later") as caught:
        require_zero(replace(whole, defer=None))
    assert "--defer none, or a schedule" in (caught.value.help or "")


def asked(clash: dict[str, object]) -> Options:
    return replace(TWO, **clash)  # type: ignore[arg-type]


@pytest.mark.parametrize(("clash", "said"), [*CLASHES, *UNPLACED])
def test_a_model_is_not_run_for_options_that_do_not_go_together(
    clash: dict[str, object], said: str, tmp_path: Path
) -> None:
    model = tmp_path / "model.py"
    model.write_text("raise SystemExit('the model was run')\n")
    for what in (
        lambda: split(model, PAIR, tmp_path / "out", asked(clash)),
        lambda: estimate(model, PAIR, asked(clash)),
        lambda: make_plan(layers(4), PAIR, Source("model.py"), asked(clash)),
    ):
        with pytest.raises(InputError) as caught:
            what()
        assert said in caught.value.what
        assert caught.value.help
    assert not (tmp_path / "out").exists()


def graph() -> Graph:
    return layers(4)


def followed() -> Plan:
    return make_plan(graph(), PAIR, Source("model.py"), TWO)


@pytest.mark.parametrize(("clash", "said"), CLASHES)
def test_what_another_plan_placed_is_refused_alike(clash: dict[str, object], said: str) -> None:
    """`--like` had none of these checks: it wrote bundles that could not run, or trained others."""
    with pytest.raises(InputError, match=said):
        plan_placed(graph(), PAIR, Source("model.py"), asked(clash), followed().placement)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"drop_last": False}, "drop_last = False"),
        ({"grad_scaler": {}}, "loss scale"),
    ],
)
def test_a_model_that_another_plan_placed_is_refused_alike(
    source: dict[str, object], said: str
) -> None:
    about = replace(Source("model.py"), **source)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=said):
        plan_placed(graph(), PAIR, about, asked({"asynchronous": "2bw"}), followed().placement)


def test_compiled_code_draws_no_numbers_where_another_plan_placed_it() -> None:
    drawn = graph()
    drawn = replace(drawn, ops=(replace(drawn.ops[0], random=True), *drawn.ops[1:]))
    with pytest.raises(InputError, match="compiled code draws others"):
        plan_placed(
            drawn, PAIR, Source("model.py"), asked({"compiled": True}), followed().placement
        )


def test_who_placed_the_followed_plan_does_not_matter() -> None:
    """A plan that `auto` made can be followed by what `auto` does not choose."""
    options = replace(TWO, partitioner=AUTO, asynchronous="2bw")
    require_options(PAIR, options, placed=True)
    plan = plan_placed(graph(), PAIR, Source("model.py"), options, followed().placement)
    assert plan.stages.asynchronous == "2bw"
