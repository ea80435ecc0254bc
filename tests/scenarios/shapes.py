"""Which members of the documented types occur in values that were seen, and which values of their closed sets.

Knows: how a msgspec type is walked beside a JSON value. Names are `Type.member`, and `Type.member=value` for a closed set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec import inspect as mi


def members(types: Iterable[type[Struct]]) -> set[str]:
    """Everything that could occur."""
    found: set[str] = set()
    for kind in types:
        _declared(mi.type_info(kind), found)
    return found


def occurring(kind: type[Struct], value: Any) -> set[str]:
    """What does occur in one value, which has been converted to `kind` before."""
    found: set[str] = set()
    _seen(mi.type_info(kind), value, found)
    return found


def _declared(info: mi.Type, found: set[str]) -> None:
    if isinstance(info, mi.StructType):
        for field in info.fields:
            name = f"{info.cls.__name__}.{field.encode_name}"
            if name not in found:
                found.add(name)
                found |= {f"{name}={choice}" for choice in _choices(field.type)}
                _declared(field.type, found)
    for inner in _inside(info):
        _declared(inner, found)


def _seen(info: mi.Type, value: Any, found: set[str]) -> None:
    if isinstance(info, mi.StructType) and isinstance(value, dict):
        for field in info.fields:
            if field.encode_name in value:
                name, member = f"{info.cls.__name__}.{field.encode_name}", value[field.encode_name]
                found.add(name)
                if isinstance(member, str) and member in _choices(field.type):
                    found.add(f"{name}={member}")
                _seen(field.type, member, found)
    for inner in _inside(info):
        for item in value if isinstance(value, list) and not isinstance(info, mi.UnionType) else [value]:
            _seen(inner, item, found)


def _inside(info: mi.Type) -> list[mi.Type]:
    if isinstance(info, mi.UnionType):
        return list(info.types)
    if isinstance(info, mi.VarTupleType):
        return [info.item_type]
    return []


def _choices(info: mi.Type) -> list[str]:
    if isinstance(info, mi.LiteralType):
        return [v for v in info.values if isinstance(v, str)]
    return [choice for inner in _inside(info) for choice in _choices(inner)]


def convert(kind: Any, value: Any) -> Any:
    """The value as the type: unknown members, wrong types and values outside a closed set raise."""
    return msgspec.convert(value, kind, strict=True)
