"""Run folders read, compared and drawn: what `scripts/report.py` and `scripts/runs.py` are made of. Needs no torch."""
