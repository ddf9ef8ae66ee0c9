"""What a bundle runs on: copied into it verbatim.

It imports torch and safetensors, and nothing of bigbrain-fx.
"""

from .channel import Channel
from .device import Device, Training, adamw
from .infer import Inference, InferenceDevice, infer_in_process, infer_main
from .kept import AssumptionError, assume, assume_not, flat, part_of
from .modules import Region, Stage, Tensors, buffer, parameter
from .train import Bundle, example_batches, main, run_in_process

__all__ = [
    "AssumptionError",
    "Bundle",
    "Channel",
    "Device",
    "Inference",
    "InferenceDevice",
    "Region",
    "Stage",
    "Tensors",
    "Training",
    "adamw",
    "assume",
    "assume_not",
    "buffer",
    "example_batches",
    "flat",
    "infer_in_process",
    "infer_main",
    "main",
    "parameter",
    "part_of",
    "run_in_process",
]
