"""Replicas and tensor groups on emulated unlike clusters: forecast against measured.

    python -m tools.studies.divided --out rows.jsonl [--only unet/] [--rounds 3]
        [--write results.md]

Linux and root. Each model runs on each emulated cluster in several ways, round after round in turn:
one device alone, replicas with equal and with planned shares of the batch, ZeRO, tensor groups with
equal and with planned parts. Forecasts rest on ops profiled on the emulated devices, all at once,
and on the parts of them that members of a tensor group compute.
A row is added for each way; rows that are there are not measured again. `--forecast` makes all
forecasts anew from the profiles beside them.
"""
