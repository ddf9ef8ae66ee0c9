"""One process in the place of an emulated device, started by whoever starts such processes.

    python inside.py ORDER PROGRAM WORDS      (a program of its own: it imports nothing of ours)

ORDER is JSON: the groups, the namespace, the quota's group and the CPUs of the device, as a
nursery's orders have them. Files that were handed down stay open. A process that is alone has no
peers to meet: it is held to its quota at once.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from nursery import enter_group, enter_namespace, hold_computation  # type: ignore[import-not-found]


def main(order: dict[str, object], words: list[str]) -> None:
    """Join the device's groups and namespace, then be the program."""
    for group in order["groups"]:  # type: ignore[attr-defined]  # a list of paths
        enter_group(group)
    enter_namespace(order["namespace"])
    if os.environ["WORLD_SIZE"] == "1":
        enter_group(order["quota_group"])
    else:
        hold_computation(order["quota_group"], order["cpus"])
    sys.argv = words
    sys.path[0] = os.getcwd()  # this file's own folder has names that a bundle may have
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
