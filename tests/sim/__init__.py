"""A deterministic simulator of the engine: virtual time, a log that can be cut anywhere, an outside with its own truth."""
