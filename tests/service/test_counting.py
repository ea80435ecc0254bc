"""The counting service itself: its counts, its faults, and that its truth outlives it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest
from tests.service.driver import CountingService, Counts


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CountingService]:
    with CountingService(tmp_path / "truth") as running:
        yield running


def call(
    service: CountingService, path: str, key: str | None = None, fault: str = "", **body: Any
) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json", "X-Fault": fault}
    if key is not None:
        headers["Idempotency-Key"] = key
    request = urllib.request.Request(service.url + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers)


def look_up(service: CountingService, query: str) -> str:
    with urllib.request.urlopen(f"{service.url}/lookup?{query}", timeout=20) as answer:
        status: str = json.load(answer)["status"]
    return status


def test_each_endpoint_counts_effects_by_its_own_class_and_the_truth_outlives_the_service(tmp_path: Path) -> None:
    with CountingService(tmp_path / "truth") as service:
        for path in ("/read", "/charge", "/charge-idempotent", "/charge-reconcilable"):
            for _ in range(2):
                status, answer = call(service, path, key="k", operation="o")
                assert (status, answer["ok"]) == (200, True)
        counts = service.counts()
    twice = {"/read": 2, "/charge": 2, "/charge-idempotent": 2, "/charge-reconcilable": 2}
    effects = {"/charge": 2, "/charge-idempotent": 1, "/charge-reconcilable": 2}
    assert counts == Counts(twice, effects, {"k": 8}, {"k": 5}, {"o": 5})
    service.start()
    call(service, "/charge-idempotent", key="k", operation="o")
    service.stop()
    assert service.counts().effects == effects


def test_a_keyed_charge_without_a_key_is_refused_and_is_no_call(service: CountingService) -> None:
    assert call(service, "/charge-idempotent")[0] == 400
    assert service.counts() == Counts()


@pytest.mark.parametrize(("point", "effects"), [("before_effect", {}), ("after_effect", {"/charge": 1})])
def test_a_dropped_call_had_its_effect_or_not_by_the_point_of_the_drop(
    service: CountingService, point: Any, effects: dict[str, int]
) -> None:
    service.fault(point, "drop")
    with pytest.raises(RemoteDisconnected):
        call(service, "/charge")
    assert (service.counts().calls, service.counts().effects) == ({"/charge": 1}, effects)
    assert call(service, "/charge")[0] == 200


def test_a_call_can_bring_its_own_fault(service: CountingService) -> None:
    with pytest.raises(RemoteDisconnected):
        call(service, "/charge", fault="drop@after_effect")
    status, headers = call(service, "/charge", fault="error:503:7@before_effect")
    assert (status, headers["Retry-After"]) == (503, "7")
    assert call(service, "/charge", fault="delay:1@before_effect")[0] == 200
    assert service.counts().effects == {"/charge": 2}


def test_a_parked_call_is_waited_for_looked_up_and_released(service: CountingService) -> None:
    service.park("before_effect", path="/charge-reconcilable")
    service.park("after_effect", path="/charge-reconcilable")
    done: list[int] = []
    caller = threading.Thread(target=lambda: done.append(call(service, "/charge-reconcilable", key="k")[0]))
    caller.start()
    assert [one["key"] for one in service.wait_parked(point="before_effect")] == ["k"]
    assert (look_up(service, "key=k"), service.counts().effects) == ("pending", {})
    assert service.release() == 1
    service.wait_parked(point="after_effect")
    assert (look_up(service, "key=k"), service.counts().effects) == ("done", {"/charge-reconcilable": 1})
    assert done == []
    assert service.release("after_effect") == 1
    caller.join(20)
    assert done == [200]


def test_a_look_up_of_what_never_came_is_absent_in_the_way_that_is_asked_for(service: CountingService) -> None:
    assert look_up(service, "key=k") == "absent"
    with pytest.raises(urllib.error.HTTPError) as missing:
        look_up(service, "key=k&as404=1")
    with missing.value:
        assert missing.value.code == 404


def test_waiting_for_a_call_that_does_not_come_is_bounded(service: CountingService) -> None:
    with pytest.raises(AssertionError, match="0 of 1 calls came to after_effect"):
        service.wait_parked(0.01)
    service.fault("after_effect", "drop", operation="never")
    service.clear()
    assert call(service, "/charge", operation="never")[0] == 200
