"""Studies: measurements that answered a question. Frozen: no types, no tests; each has a README."""
