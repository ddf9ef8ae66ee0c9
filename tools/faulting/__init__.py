"""Faults on purpose: runs of a small bundle in which processes die, hang, or find broken files.

`tools/faults.py` is the door. Nothing of the runtime or the supervisor knows of this folder: what
strikes is a file that is put into a copy of the bundle.
"""
