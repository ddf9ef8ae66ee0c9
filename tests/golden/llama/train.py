"""Train Llama: one process per device.

    bigbrain-fx run . --steps 100                            # all devices on this host
    torchrun --nproc-per-node 2 train.py --steps 100         # the same without bigbrain-fx
    python train.py --in-process --steps 2                   # all devices in one process, for pdb
"""

from pathlib import Path

import device_0
import device_1
import training
from runtime import Bundle, Training, main

BUNDLE = Bundle(
    folder=Path(__file__).resolve().parent,
    plan="0123456789abcdef",
    devices=(device_0.Device0, device_1.Device1,),
    kinds=("cpu", "cpu"),
    threads=(1, 1),
    seed=0,
    batches=training.batches,
    inputs=training.INPUTS,
    whole=training.WHOLE,
    training=Training(training.OPTIMIZER, training.LR_SCALE, training.CLIP_NORM),
    specs=training.SPECS,
)

if __name__ == "__main__":
    main(BUNDLE)
