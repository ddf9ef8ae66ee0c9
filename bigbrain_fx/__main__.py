"""`python -m bigbrain_fx` is the command `bigbrain-fx`."""

from bigbrain_fx.cli import main

main()
