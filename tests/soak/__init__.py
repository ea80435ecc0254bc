"""A long life in short: one store, daemon after daemon killed at moments that nobody chose, every answer held against the last."""
