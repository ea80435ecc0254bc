"""The demonstration's agent: four turns of a scripted model, and five tools with the contract that each one keeps.

This is what a caller sends in `start`. With a real model the `script` would be a provider's name; all else stays.
"""

from __future__ import annotations

from typing import Any

READ, ASSIGN, CLOSE, REFUND, NOTIFY = (f"tickets.{name}" for name in ("read", "assign", "close", "refund", "notify"))
FIRST, SECOND = "T-1001", "T-1002"

CONTRACTS = {
    READ: "read_only",
    ASSIGN: "idempotent",
    CLOSE: "reconcilable",
    REFUND: "at_most_once",
    NOTIFY: "at_most_once",
}

EXPECTED = ((FIRST, REFUND), (FIRST, ASSIGN), (SECOND, ASSIGN), (FIRST, CLOSE), (SECOND, CLOSE), (SECOND, NOTIFY))
"""Every effect that the script asks for. Each must be there once: no less, and no more."""


def agent(service: str) -> dict[str, Any]:
    """The agent, for a ticket service at this URL."""
    return {
        "name": "ticket-desk",
        "instructions": "Settle the tickets.",
        "model": {"provider": "scripted", "script": _SCRIPT},
        "tools": [
            _tool(service, READ, method="GET"),
            # The service remembers `Idempotency-Key`: the same key again is no second effect.
            _tool(service, ASSIGN, to="string"),
            # The service can be asked afterwards: the ticket itself tells whether the call arrived.
            _tool(service, CLOSE) | {"lookup": {"url": service + "/tickets/{ticket}", "found": "status == 'closed'"}},
            # Nothing is promised about these: a second call is a second refund, a second message.
            _tool(service, REFUND, cents="integer"),
            _tool(service, NOTIFY, text="string"),
        ],
        "policy": {
            "rules": [
                {"do": "ask", "tool": REFUND, "expires": "1h"},
                {"do": "allow", "tool": ASSIGN},
                {"do": "allow", "tool": CLOSE},
                {"do": "allow", "tool": NOTIFY},
            ]
        },
    }


def _tool(service: str, name: str, method: str = "POST", **arguments: str) -> dict[str, Any]:
    operation = name.partition(".")[2]
    path = "/tickets/{ticket}" + ("" if method == "GET" else f"/{operation}")
    properties = {argument: {"type": kind} for argument, kind in {"ticket": "string", **arguments}.items()}
    return {
        "name": name,
        "description": f"{operation.capitalize()} one ticket.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        "effect": CONTRACTS[name],
        "http": {"method": method, "url": service + path},
    }


def _call(tool: str, ticket: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": {"ticket": ticket, **arguments}}


_SCRIPT = [
    {"text": "I look at both tickets.", "calls": [_call(READ, FIRST), _call(READ, SECOND)]},
    {"text": f"{FIRST} was charged twice: a refund.", "calls": [_call(REFUND, FIRST, cents=4200)]},
    {
        "text": "Both get an owner and are closed; the customer of the second one is told.",
        "calls": [
            _call(ASSIGN, FIRST, to="amira"),
            _call(ASSIGN, SECOND, to="jonas"),
            _call(CLOSE, FIRST),
            _call(CLOSE, SECOND),
            _call(NOTIFY, SECOND, text="Your parcel is on its way."),
        ],
    },
    {"text": "Both tickets are settled."},
]
