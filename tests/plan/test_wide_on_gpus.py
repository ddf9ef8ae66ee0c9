"""A cut through what autocast keeps in float32 on a GPU alone is refused, nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, Source, make_plan, require_sent_types, wide_on_gpus
from tests.support import samples


class Net(nn.Module):
    """A stem, which may be normalised, and blocks that add to it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.a = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stemmed(x)
        for a in self.a:
            x = a(x) if self.how == "multiplied since" else x + F.gelu(a(x))
        return self.head(x).float().square().mean()

    def stemmed(self, x: Tensor) -> Tensor:
        if self.how == "float32 before":
            return self.norm(x + self.stem(x))
        if self.how.startswith("region"):
            off = self.how != "region, off"
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=off):
                return self.norm(self.stem(x))
        if self.how == "added in place":
            own = self.stem(x)
            own += self.norm(self.stem(x))
            return own
        x = self.norm(self.stem(x))
        if self.how == "adds in place":
            x += self.a[0](x.float())
        return x.float() if self.how == "as is told" else x


def planned(how: str, autocast: str | None = "bfloat16", kinds: str = "gg") -> Plan:
    torch.manual_seed(0)
    graph = capture(Net(how), {"x": torch.randn(8, 8)}, autocast=autocast).graph
    two = samples.cluster(2)
    devices = [
        replace(device, kind="cuda" if kind == "g" else "cpu")
        for device, kind in zip(two.devices, kinds, strict=True)
    ]
    options = Options("naive", micro_batches=2)
    return make_plan(graph, replace(two, devices=tuple(devices)), Source(""), options)


@pytest.mark.gate("adds in place")
@pytest.mark.parametrize("how", ["normalised", "region, on", "adds in place"])
def test_gpus_do_not_send_the_output_of_a_layer_norm(how: str) -> None:
    with pytest.raises(InputError, match="a GPU keeps layer_norm in float32") as caught:
        require_sent_types(planned(how))
    assert str(caught.value.at).startswith("test_wide_on_gpus.py:")
    assert ".float() after the layer_norm" in str(caught.value.help)


FINE: Mapping[str, tuple[str, str | None, str]] = {
    "as is told": ("as is told", "bfloat16", "gg"),
    "CPUs": ("normalised", "bfloat16", "cc"),
    "a CPU sends it": ("normalised", "bfloat16", "cg"),
    "without autocast": ("normalised", None, "gg"),
    "float32 before": ("float32 before", "bfloat16", "gg"),
    "added in place": ("added in place", "bfloat16", "gg"),
    "multiplied since": ("multiplied since", "bfloat16", "gg"),
    "a region without": ("region, off", "bfloat16", "gg"),
}


@pytest.mark.gate("a region without")
@pytest.mark.parametrize("name", FINE)
def test_values_of_one_type_everywhere_are_planned(name: str) -> None:
    require_sent_types(planned(*FINE[name]))


def test_names_are_of_torch() -> None:
    named = wide_on_gpus._FLOAT32 | wide_on_gpus._SIXTEEN
    assert [name for name in named if not hasattr(torch.ops.aten, name)] == []
    assert not wide_on_gpus._FLOAT32 & wide_on_gpus._SIXTEEN
