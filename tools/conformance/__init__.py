"""Bundles compared with plain PyTorch and with forecasts, over many models, plans and faults."""

COMMANDS = {
    "forms": "forms of training code, each against a plain training loop",
    "matrix": "models x partitioners x devices x schedules: bitwise equal to one process",
    "pairs": "every pair of features: bitwise equal, or refused with a remedy",
    "coverage": "models of the zoo: captured, split, trained as processes, compared",
    "faults": "processes that die, hang or find broken files: the run's numbers stay",
    "memory": "forecast against measured peak memory of each device",
    "brute_force": "plans of `auto` against every plan of small instances",
}
