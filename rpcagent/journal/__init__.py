"""The durable log: commits of runs as bytes and numbers. Nothing here knows what an event is."""
