"""A bundle with an int8 base under LoRA has the bits of the rounded model, in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.bundles.verifying import verify
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, read_plan
from bigbrain_fx.weights import stored_tensors
from tests.support.bundles import MODEL, cluster

pytestmark = pytest.mark.nightly


LIMIT_S = 300.0
LORA = (
    MODEL.replace("Dropout(0.1)", "Dropout(0.0)")
    .replace("        self.head.weight = self.embed.weight\n", "")
    .replace(
        "class Block(",
        """class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Block(""",
    )
    .replace(
        "    return Net()\n",
        """    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return net
""",
    )
)


def test_an_int8_base_under_lora_has_the_bits_of_the_rounded_model(tmp_path: Path) -> None:
    path, bundle = tmp_path / "lora.py", tmp_path / "bundle"
    path.write_text(LORA)
    options = Options("naive", micro_batches=2, quantize="int8")
    bigbrain_fx.split(path, cluster(), bundle, options)
    assert read_plan(bundle).source.quantize == "int8"
    found = verify(bundle, steps=2, time_limit_s=LIMIT_S)
    *links, _ = found.checks  # the last one: whole batch = micro-batches
    assert {check.word for check in links} == {"equal"}
    assert "rounded to int8 by verify's own formula" in found.checks[0].detail
    out = tmp_path / "out.safetensors"
    bigbrain_fx.export_weights(bundle, out)
    names = set(stored_tensors(bundle / "weights"))
    rounded = {name for n in names if n.endswith("_scale") for name in (n, n[: -len("_scale")])}
    assert len(rounded) == 2 * 10
    assert set(bigbrain_fx.weights.read_checkpoint(out).tensors) == names - rounded
    with pytest.raises(InputError, match="load: frozen weights of this bundle are int8"):
        bigbrain_fx.load_weights(bundle, out)
