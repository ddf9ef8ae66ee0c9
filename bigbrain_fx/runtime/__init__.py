"""What a bundle runs on: copied into it verbatim.

It imports torch and safetensors, and nothing of bigbrain-fx.
"""

from .channel import Channel
from .device import Device, Training, adamw
from .modules import Region, Stage, Tensors, buffer, parameter
from .train import Bundle, example_batches, main, run_in_process

__all__ = [
    "Bundle",
    "Channel",
    "Device",
    "Region",
    "Stage",
    "Tensors",
    "Training",
    "adamw",
    "buffer",
    "example_batches",
    "main",
    "parameter",
    "run_in_process",
]
