"""rpcagent: a JSON-RPC 2.0 daemon on stdio that runs agents durably."""

__version__ = "0.1.0"
