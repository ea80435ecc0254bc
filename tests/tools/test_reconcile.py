"""What the answer of a look-up says: every row of the table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rpcagent.errors import InvalidParams
from rpcagent.runs.outcomes import LookUp
from rpcagent.tools.reconcile import Answer, LookUpCall, check_conditions, judge

NOTHING = msgspec.UNSET
RESULT = {"content": [{"type": "text", "text": "the body"}]}
DONE = "status == 'done'"
NONE = "status == 'none'"
BUSY = "status == 'busy'"

ROWS: list[tuple[dict[str, str], int, Any, str]] = [
    ({}, 200, {"status": "done"}, "found"),
    ({}, 200, {"status": "other"}, "absent"),
    ({}, 200, [], "absent"),
    ({}, 404, {"error": "none"}, "absent"),
    ({}, 404, NOTHING, "absent"),
    ({}, 200, NOTHING, "unsure"),
    ({}, 401, {"status": "done"}, "unsure"),
    ({}, 500, {"status": "done"}, "unsure"),
    ({}, 302, NOTHING, "unsure"),
    ({"absent": NONE}, 200, {"status": "done"}, "found"),
    ({"absent": NONE}, 200, {"status": "none"}, "absent"),
    ({"absent": NONE}, 200, {"status": "other"}, "unsure"),
    ({"absent": NONE}, 404, {"status": "none"}, "absent"),
    ({"absent": NONE}, 404, {"status": "done"}, "unsure"),
    ({"absent": NONE}, 404, NOTHING, "unsure"),
    ({"pending": BUSY}, 200, {"status": "busy"}, "pending"),
    ({"pending": BUSY}, 200, {"status": "done"}, "found"),
    ({"pending": BUSY}, 200, {"status": "other"}, "absent"),
    ({"pending": BUSY, "absent": "`true`"}, 200, {"status": "busy"}, "pending"),
    ({"found": "length(items)"}, 200, {"items": []}, "absent"),
    ({"found": "length(items)"}, 200, {"items": [1]}, "found"),
    ({"found": "length(items)"}, 200, {}, "unsure"),  # it cannot be evaluated
    ({"pending": "length(items)"}, 200, {}, "unsure"),
    ({"absent": "length(items)"}, 200, {}, "unsure"),
]


@pytest.mark.parametrize(("conditions", "status", "value", "answer"), ROWS)
def test_a_look_up_says_found_absent_pending_or_unsure(
    conditions: dict[str, str], status: int, value: Any, answer: Any
) -> None:
    call = LookUpCall(**{"url": "http://h/", "found": DONE, **conditions})
    result = RESULT if answer == "found" else None
    assert judge(call, Answer(status=status, value=value, result=RESULT)) == LookUp(answer=answer, result=result)


def test_a_look_up_that_failed_is_unsure() -> None:
    assert judge(LookUpCall(url="http://h/", found=DONE), None) == LookUp(answer="unsure")


@pytest.mark.parametrize("name", ["found", "absent", "pending"])
@pytest.mark.parametrize("expression", ["status ==", "", "[?"])
def test_a_condition_that_is_no_jmespath_is_refused_by_its_path(name: str, expression: str) -> None:
    call = LookUpCall(**{"url": "http://h/", "found": DONE, name: expression})
    with pytest.raises(InvalidParams) as refused:
        check_conditions(call, "$.agent.tools[1].lookup")
    details = {"path": f"$.agent.tools[1].lookup.{name}", "reason": "this is no JMESPath expression"}
    assert refused.value.details == details


def test_a_condition_with_a_function_that_jmespath_has_not_is_refused_before_an_effect_is_in_doubt() -> None:
    call = LookUpCall(url="http://h/", found="length(items[?closed(@)].max_by(@, &sum(x))) > `0`")
    with pytest.raises(InvalidParams) as refused:
        check_conditions(call, "$.lookup")
    assert refused.value.details == {"path": "$.lookup.found", "reason": "JMESPath has no function 'closed'"}
