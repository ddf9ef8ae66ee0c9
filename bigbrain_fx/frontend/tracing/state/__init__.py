"""State in Python objects: snapshots of attributes, counters, random generators."""
