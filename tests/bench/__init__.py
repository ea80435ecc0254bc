"""Figures: counts, CPU time and ratios to a floor of the same run. `python -m tests.bench` prints them all."""
