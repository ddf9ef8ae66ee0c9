"""The figures of units: devices that cost the same share them, whatever is made of them."""

from __future__ import annotations

import pytest

from bigbrain_fx.planning import work
from bigbrain_fx.planning.registry import estimator
from bigbrain_fx.planning.unit_work import OnKind
from tests.support.synthetic import chain_graph, cluster_of, device


def test_units_are_put_in_order_once_for_devices_that_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of hundreds of GPUs there are a few kinds: what is done for each device takes minutes."""
    graph = chain_graph(0, 6)
    cluster = cluster_of(*(device(f"d{i}", 1 + i % 2) for i in range(6)))
    known = work(graph, estimator("analytical").estimate(graph, cluster))
    asked: list[OnKind] = []
    merged = OnKind.merged

    def counted(self: OnKind, *args: object) -> OnKind:
        asked.append(self)
        return merged(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OnKind, "merged", counted)
    found = known.merged([[old] for old in reversed(range(known.count))])
    assert len(asked) == len({id(on) for on in known.on.values()}) == 2
    assert len({id(on) for on in found.on.values()}) == 2
    for name, on in known.on.items():
        assert found.on[name].forward_s.tolist() == on.forward_s.tolist()[::-1]
