"""Train Net on this host and keep it going when processes die.

    python launch.py --steps 100 --standby 1

A process that dies is replaced by a standby worker, which takes the device's
last in-memory checkpoint and replays later steps; the result is the same.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under `python -P` and -I

try:
    from supervisor import main
except ImportError as error:
    print(f"error[BX3690]: {error}: copy the bundle again, or install torch", file=sys.stderr)
    sys.exit(2)

DEVICES = ("d0", "d1")

if __name__ == "__main__":
    main(Path(__file__).resolve().parent, DEVICES, "train.py")
