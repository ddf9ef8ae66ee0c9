"""Plans of `auto` and of Sailor for the same clusters, each by both simulators.

`peer` runs what others wrote, from a folder of theirs; `plans` puts a plan of ours into their words
and one of theirs into ours; `clusters` has their experiments. None of their files is here.
"""
