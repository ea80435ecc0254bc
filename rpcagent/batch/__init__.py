"""`rpcagent run` and its kin: durable runs from a shell, by a client of the daemon like any other."""
