"""`rpcagent demo`: a run that survives kill -9 at the worst moments, and the count that proves it."""

from rpcagent.demo.story import demo

__all__ = ["demo"]
