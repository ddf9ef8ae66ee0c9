"""Every plan of a small model on a few devices, against the one that `auto` makes."""
