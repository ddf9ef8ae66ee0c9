"""Models of images: classes, segments, boxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tools.conformance.zoo.case import DEPTH, Batch, Case
from tools.conformance.zoo.hugging_face import ROWS, built, of

_SIDE = 32
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "image_size": _SIDE,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
}
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [2, 2]}


def images(rows: int = ROWS, side: int = _SIDE) -> Tensor:
    """Return random images."""
    return torch.randn(rows, 3, side, side)


def _classes() -> Batch:
    return {"pixel_values": images(), "labels": torch.randint(0, 4, (ROWS,))}


def _segments() -> Batch:
    return {"pixel_values": images(), "labels": torch.randint(0, 4, (ROWS, _SIDE, _SIDE))}


def _case(
    name: str,
    config: str,
    model: str,
    layers: str = "num_hidden_layers",
    batch: Any = _classes,
    **options: Any,
) -> Case:
    """Return a case; without a `layers` option the depths of its stages are doubled."""

    def build(depth: int) -> nn.Module:
        if layers:
            counts: dict[str, object] = {layers: depth}
        else:
            key = "num_layers" if "num_layers" in options else "depths"
            counts = {key: [max(1, n * depth // DEPTH) for n in options[key]]}
        return built(config, model, **{"num_labels": 4, **options, **counts})

    return Case(name, build, batch)


def _detr_config() -> Any:
    backbone = of("ResNetConfig")(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    return of("DetrConfig")(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        backbone=None,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=5,
        num_labels=4,
    )


def _boxes_loss(output: Any, batch: Any) -> Tensor:
    flat = output.logits.flatten(0, 1)
    named = nn.functional.cross_entropy(flat, batch["classes"].flatten())
    return named + nn.functional.l1_loss(output.pred_boxes, batch["boxes"])


def _boxes() -> Batch:
    classes = torch.randint(0, 4, (ROWS, 5))
    return {"pixel_values": images(side=64), "classes": classes, "boxes": torch.rand(ROWS, 5, 4)}


def _found_objects() -> Batch:
    found = [
        {"class_labels": torch.randint(0, 4, (2,)), "boxes": torch.rand(2, 4) / 2 + 0.2}
        for _ in range(ROWS)
    ]
    return {"pixel_values": images(side=64), "labels": found}


CASES = (
    _case("vit", "ViTConfig", "ViTForImageClassification", **_VIT),
    _case("deit", "DeiTConfig", "DeiTForImageClassification", **_VIT),
    _case("beit", "BeitConfig", "BeitForImageClassification", **_VIT, drop_path_rate=0.1),
    _case("dinov2", "Dinov2Config", "Dinov2ForImageClassification", **_VIT),
    _case(
        "vit-mae",
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        **_VIT,
        batch=lambda: {"pixel_values": images()},
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    _case(
        "swin",
        "SwinConfig",
        "SwinForImageClassification",
        "",
        image_size=_SIDE,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.1,
    ),
    _case(
        "convnext",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "",
        **_STAGES,
        num_stages=2,
        drop_path_rate=0.1,
    ),
    _case(
        "resnet", "ResNetConfig", "ResNetForImageClassification", "", **_STAGES, embedding_size=16
    ),
    _case(
        "regnet",
        "RegNetConfig",
        "RegNetForImageClassification",
        "",
        **_STAGES,
        embedding_size=16,
        groups_width=8,
    ),
    _case(
        "segformer",
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        "",
        batch=_segments,
        num_encoder_blocks=2,
        depths=[2, 2],
        hidden_sizes=[16, 32],
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
    ),
    _case(
        "poolformer",
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        "",
        depths=[2, 2],
        hidden_sizes=[16, 32],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    _case(
        "mobilenet-v2",
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        "",
        depths=[],
        depth_multiplier=0.25,
    ),
    Case(
        "detr",
        lambda _: of("DetrForObjectDetection")(_detr_config()),
        _boxes,
        _boxes_loss,
        depth=0,
    ),
    Case(
        "detr-matcher",
        lambda _: of("DetrForObjectDetection")(_detr_config()),
        _found_objects,  # the matcher runs in SciPy, opaque
        depth=0,
    ),
)
