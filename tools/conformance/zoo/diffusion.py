"""Models that denoise, from diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.conformance.zoo.case import Batch, Case

_ROWS, _SIDE = 4, 8
_LATENT = {
    "sample_size": _SIDE,
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "patch_size": 2,
}
"""A small transformer on latents."""


def _of(name: str) -> Any:
    return getattr(diffusers, name)


def _mse(output: Any, batch: Any) -> Tensor:
    return F.mse_loss(output.sample, batch["target"])


def _noise(channels: int = 4) -> Tensor:
    return torch.randn(_ROWS, channels, _SIDE, _SIDE)


def _times() -> Tensor:
    return torch.randint(0, 1000, (_ROWS,))


def _unet(depth: int) -> nn.Module:
    made: nn.Module = _of("UNet2DConditionModel")(
        sample_size=_SIDE,
        block_out_channels=(16, 32),
        layers_per_block=max(1, depth // 2),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        dropout=0.1,
    )
    return made


def _told() -> Batch:
    return {
        "sample": _noise(),
        "timestep": _times(),
        "encoder_hidden_states": torch.randn(_ROWS, 6, 16),
        "target": _noise(),
    }


def _vae(_: int) -> nn.Module:
    made: nn.Module = _of("AutoencoderKL")(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )
    return made


class _Sampling(nn.Module):
    """Train an autoencoder: reconstruction and divergence, with a sampled latent."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = _vae(0)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        posterior = self.vae.encode(images).latent_dist  # type: ignore[operator]  # a method
        made = self.vae.decode(posterior.sample()).sample  # type: ignore[operator]  # a method
        return {"loss": F.mse_loss(made, images) + 1e-4 * posterior.kl().mean(), "images": made}


def _images() -> Batch:
    images = torch.randn(_ROWS, 3, 16, 16)
    return {"sample": images, "target": images.clone()}


def _dit(depth: int) -> nn.Module:
    made: nn.Module = _of("DiTTransformer2DModel")(
        **_LATENT, num_layers=depth, num_embeds_ada_norm=1000
    )
    return made


def _classed() -> Batch:
    return {
        "hidden_states": _noise(),
        "timestep": _times(),
        "class_labels": torch.randint(0, 1000, (_ROWS,)),
        "target": _noise(),
    }


def _pixart(depth: int) -> nn.Module:
    made: nn.Module = _of("PixArtTransformer2DModel")(
        **_LATENT,
        num_layers=depth,
        cross_attention_dim=32,
        caption_channels=16,
        use_additional_conditions=False,
    )
    return made


def _sd3(depth: int) -> nn.Module:
    made: nn.Module = _of("SD3Transformer2DModel")(
        **_LATENT,
        num_layers=depth,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    return made


def _prompted() -> Batch:
    return {
        "hidden_states": _noise(),
        "encoder_hidden_states": torch.randn(_ROWS, 6, 16),
        "pooled_projections": torch.randn(_ROWS, 16),
        "timestep": _times(),
        "target": _noise(),
    }


def _captioned() -> Batch:
    return {
        "hidden_states": _noise(),
        "encoder_hidden_states": torch.randn(_ROWS, 6, 16),
        "timestep": _times(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "target": _noise(),
    }


def _flux(depth: int) -> nn.Module:
    made: nn.Module = _of("FluxTransformer2DModel")(
        patch_size=1,
        in_channels=4,
        num_layers=depth,
        num_single_layers=depth,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=False,
    )
    return made


def _packed() -> Batch:
    return {
        "hidden_states": torch.randn(_ROWS, 16, 4),
        "encoder_hidden_states": torch.randn(_ROWS, 6, 16),
        "pooled_projections": torch.randn(_ROWS, 16),
        "timestep": torch.rand(_ROWS),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
        "target": torch.randn(_ROWS, 16, 4),
    }


def _plain_unet(depth: int) -> nn.Module:
    made: nn.Module = _of("UNet2DModel")(
        sample_size=_SIDE,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=max(1, depth // 2),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return made


def _untold() -> Batch:
    return {"sample": _noise(), "timestep": _times(), "target": _noise()}


CASES = (
    Case("unet2d-condition", _unet, _told, _mse),
    Case("unet2d", _plain_unet, _untold, _mse),
    Case("autoencoder-kl", _vae, _images, _mse, depth=0),
    Case(
        "autoencoder-kl-sampled",
        lambda _: _Sampling(),
        lambda: {"images": torch.randn(_ROWS, 3, 16, 16)},
        depth=0,
    ),
    Case("dit", _dit, _classed, _mse),
    Case("pixart", _pixart, _captioned, _mse),
    Case("sd3", _sd3, _prompted, _mse),
    Case("flux", _flux, _packed, _mse),
)
