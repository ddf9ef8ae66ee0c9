"""Data parallel against model parallel, the founders' own study: measured rows, and a page of them.

    python -m tools.studies.dp_vs_mp --out rows.jsonl --write results.md
        [--only gpt] [--only digits]

Linux and root, as `tools.studies.emulation`; `--only digits` needs neither. `cells` says what is
run, `emulating` runs it on an emulated cluster, `scaling` trains digits to 95 % in one process,
`page` writes. A run that was stopped goes on. All of it is 98 cells and 12 trainings.
"""
