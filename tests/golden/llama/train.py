"""Train Llama: one process per device.

    bigbrain-fx run . --steps 100                            # on this host; replaces what dies
    python launch.py --steps 100                             # the same without bigbrain-fx
    torchrun --nproc-per-node 2 train.py --steps 100         # under torchrun; one death ends all
    python train.py --in-process --steps 2                   # all devices in one process, for pdb

HOOKS has the places for functions of your own; `--help` lists what else may be said.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # `python -P` and `-I` leave this folder out
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        from runtime import main
    except ImportError as error:
        print(f"error[BX3690]: {error}: copy the bundle again, or install torch", file=sys.stderr)
        sys.exit(2)

import device_d0
import device_d1
import training
from runtime import Bundle, Hooks, Training

# Your own functions, called in every process at these places of a step. At on_step_end the step's
# messages have left and the optimizer has stepped: under launch.py this is the recovery point, and
# what on_send sees is kept until no device can need it again.
HOOKS = Hooks(
    on_step_begin=[],  # f(device, step)
    on_step_end=[],  # f(device, step)
    on_send=[],  # f(device, channel, tensor)
    on_recv=[],  # f(device, channel, tensor)
)

BUNDLE = Bundle(
    folder=Path(__file__).resolve().parent,
    plan="0123456789abcdef",
    devices=(device_d0.DeviceD0, device_d1.DeviceD1),
    kinds=("cpu", "cpu"),
    threads=(1, 1),
    seed=0,
    batches=training.batches,
    inputs=training.INPUTS,
    whole=training.WHOLE,
    training=Training(training.OPTIMIZER, training.LR_SCALE, training.CLIP_NORM),
    specs=training.SPECS,
    hooks=HOOKS,
)

if __name__ == "__main__":
    main(BUNDLE)
