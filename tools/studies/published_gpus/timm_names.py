"""Models of timm whose rows are in the table: a few of each family, by name and image side."""

from __future__ import annotations

from collections.abc import Mapping

_SIDES = {
    224: "resnet50 resnet18 resnet101 resnext50_32x4d seresnext101_32x8d wide_resnet50_2 "
    "convnext_tiny convnext_base tf_efficientnet_b0 tf_efficientnet_lite0 "
    "tf_mobilenetv3_large_100 regnetv_040 rexnet_100 densenet201 vgg16 deit_base_patch16_224 "
    "deit_small_patch16_224 deit3_large_patch16_224 beit_base_patch16_224 "
    "swin_tiny_patch4_window7_224 mixer_b16_224 gmlp_s16_224 resmlp_24_224 poolformer_s12 "
    "coatnet_0_224 mobilenetv4_conv_medium dpn92 gernet_m tnt_s_patch16_224 selecsls42b "
    "ghostnetv2_100 semnasnet_100 fbnetc_100 resnetv2_50 tf_mixnet_m skresnet34 "
    "efficientformer_l1 convnextv2_tiny",
    256: "mobilevitv2_100 cs3darknet_l cspresnet50 resnetrs152 mobilevit_s",
    299: "tf_inception_v3 xception41",
    300: "tf_efficientnet_b3 tf_efficientnetv2_s",
}
TIMM: Mapping[str, int] = {name: side for side, names in _SIDES.items() for name in names.split()}
