"""Published models divided inside their ops, over two and three unlike members: verified, trained.

The last word is of processes: each member is one, over gloo, where nothing of ours can be imported.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigbrain_fx.bundles.launch import free_port
from tests.promise.conftest import NUMPY, Outside
from tests.support.command_line import call, write_cluster, write_model

pytest.importorskip("transformers")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]  # libraries deprecate

STEPS = 3
TEXT = """
    vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=32,
    bos_token_id=0, eos_token_id=1, pad_token_id=2"""
IMAGES = "num_labels=5"
BUILDS = {
    "llama": f"LlamaForCausalLM(transformers.LlamaConfig({TEXT}))",
    "qwen3": "Qwen3ForCausalLM(transformers.Qwen3Config("
    f"{TEXT}, head_dim=8, tie_word_embeddings=True))",
    "mixtral": "MixtralForCausalLM(transformers.MixtralConfig("
    f"{TEXT}, num_local_experts=4, num_experts_per_tok=2))",
    "vit": "ViTForImageClassification(transformers.ViTConfig(hidden_size=48, num_hidden_layers=2, "
    f"num_attention_heads=6, intermediate_size=96, image_size=16, patch_size=4, {IMAGES}))",
    "resnet": "ResNetForImageClassification(transformers.ResNetConfig(embedding_size=12, "
    f"hidden_sizes=[12, 24], depths=[1, 2], layer_type='basic', {IMAGES}))",
}
TOKENS = """
    ids = torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}
"""
PIXELS = """
    source = torch.Generator().manual_seed(0)
    pixels = torch.randn(4, 3, 16, 16, generator=source)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (4,), generator=source)}
"""
FILE = """
import torch
import transformers


def model():
    torch.manual_seed(0)
    return transformers.{build}


def example_batch():{batch}
"""


@pytest.mark.parametrize("shares", ["2:1", "2:1:1"])
@pytest.mark.parametrize("name", BUILDS)
def test_members_train_as_one_process(
    name: str, shares: str, tmp_path: Path, outside: Outside
) -> None:
    members = len(shares.split(":"))
    batch = PIXELS if name in ("vit", "resnet") else TOKENS
    model = write_model(tmp_path, FILE.format(build=BUILDS[name], batch=batch))
    cluster = write_cluster(tmp_path, members)
    groups = ["--tensor-parallel", str(members), "--tp-ratio", shares]
    bundle = tmp_path / "bundle"
    done = call(
        "split", model, "--devices", cluster, *groups, "--partitioner", "naive", "--out", bundle
    )
    assert done.code == 0, done.err
    axes = json.loads((bundle / "plan.json").read_text())["placement"]["tensor"]["axes"]
    kinds = {axis["kind"] for axis in axes}
    assert kinds & {"heads", "hidden", "channels"}
    assert name == "resnet" or "heads" in kinds

    checked = call("verify", bundle, "--processes", "--steps", str(STEPS), "--json")
    assert checked.code == 0, checked.out + checked.err
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(members)]
    port = ["--master-port", str(free_port())]
    words = [*launcher, *port, "train.py", "--json", "--steps", str(STEPS)]
    (tmp_path / "blocked" / "bigbrain_fx").mkdir(parents=True)
    (tmp_path / "blocked" / "bigbrain_fx" / "__init__.py").write_text("raise ImportError")
    more = {**NUMPY, "PYTHONPATH": str(tmp_path / "blocked")}  # mixtral's op needs its library
    trained = outside.results(outside.start(bundle, words, more))[0]
    losses = [json.loads(line)["loss"] for line in trained.splitlines() if line.startswith("{")]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
