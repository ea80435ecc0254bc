"""Which values a member may have, for the message that refuses another one.

Knows: how a path such as `$.agent.policy.rules[0].do` leads through the types of params. Only refusals come here.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec import inspect as mi

_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(?:\d+|\.\.\.)\]")


def choices_at(struct: type[Struct], path: str) -> list[str]:
    """The closed set at the path, in the order of its type; empty where there is none."""
    here: list[mi.Type] = [mi.type_info(struct)]
    for step in _STEP.finditer(path):
        here = [inner for info in here for outer in _options(info) for inner in _inside(outer, step[1])]
    options = [option for info in here for option in _options(info)]
    return [str(value) for option in options if isinstance(option, mi.LiteralType) for value in option.values]


def _options(info: mi.Type) -> list[mi.Type]:
    return list(info.types) if isinstance(info, mi.UnionType) else [info]


def _inside(info: mi.Type, member: str | None) -> list[mi.Type]:
    """The types of a member, or of the elements where `member` is None."""
    if isinstance(info, mi.StructType) and member is not None:
        return [field.type for field in info.fields if field.encode_name == member]
    if isinstance(info, mi.VarTupleType) and member is None:
        return [info.item_type]
    if isinstance(info, mi.DictType) and member is None:
        return [info.value_type]
    return []
