"""A hash of every plan of many cases: the net under changes that should change no plan.

    from tools.plan_digest import cases, digests
    found = digests(cases(models=("digits",)))

`case_list` lists the cases, `hashing` plans them and hashes the plans, `tables` keeps and compares
hashes, `revision` has another revision of the repository do the same.
"""

from tools.plan_digest.case_list import Case, cases, gate_cases
from tools.plan_digest.hashing import Digest, digests
from tools.plan_digest.tables import Change, changes, read_table, write_table

__all__ = [
    "Case",
    "Change",
    "Digest",
    "cases",
    "changes",
    "digests",
    "gate_cases",
    "read_table",
    "write_table",
]
