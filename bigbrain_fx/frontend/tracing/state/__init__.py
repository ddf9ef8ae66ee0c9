"""State in Python objects: copies of attributes, counters, random generators."""
