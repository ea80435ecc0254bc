"""The same work by other systems that keep runs durably, in the same minutes. `python -m tests.bench --peers`."""
