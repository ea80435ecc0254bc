"""What the model is shown, and the names of things: the same in every process. F047, F049, F051, S0-27."""

from __future__ import annotations

from typing import Any

import pytest
from rpcagent import ids
from rpcagent.ids import digest_of
from rpcagent.runs import events as ev
from rpcagent.runs.context import keeping
from rpcagent.runs.definition import Definition
from rpcagent.runs.outcomes import AskedCall, Failed, ModelReply
from rpcagent.runs.requests import StepCommand

from .story import DONE, RUN, Story, definition, sid


def test_every_id_is_derived_and_never_changes_between_versions():
    run = ids.run_id("store", "", "start-1")
    assert run == "run_rschanlmxxf32ujhvwdwlu7ezj"
    assert ids.step_id(run, 2) == "stp_rschanlmxxf32ujhvwdwlu7ezj_2"
    assert ids.approval_id(run, 1) == "apr_rschanlmxxf32ujhvwdwlu7ezj_1"
    request_hash = digest_of(["t.put", {"n": 0}])
    assert request_hash == "sha256:ae353be639e87b582e2c7c697a3b063a2a906204a4a6588b7b0e055ccc8c8c21"
    assert ids.effect_key(sid(2), request_hash) == "key_xcutzeikx6h5cs2fcqq7dyrrkx"
    assert digest_of(Definition(agent="a")) == "sha256:3422f2cf0d8d6c34e57c3f8c5c90cec0d04263a827956679c4bb6120131247b3"


def test_another_store_or_namespace_or_key_is_another_run():
    made = {ids.run_id(*parts) for parts in (("s", "", "k"), ("t", "", "k"), ("s", "n", "k"), ("s", "", "l"))}
    assert len(made) == 4
    assert all(ids.is_run_id(run) for run in made)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("a", True), ("A-z.0_9:/", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a b", False),
        ("é", False), ("a\n", False), ("a\x1fb", False),
    ],
)  # fmt: skip
def test_a_request_key_is_short_and_plain(text: str, valid: bool):
    assert ids.is_request_key(text) is valid


def test_a_digest_does_not_depend_on_the_order_of_members():
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": [1, 2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def results(story: Story) -> list[tuple[str, str]]:
    """(step, text) of all results in the context."""
    return [(m.step_id, m.result["content"][0]["text"]) for m in story.state.messages if m.role == "tool" and m.result]


def test_each_call_gets_exactly_one_result_in_call_order_whatever_became_of_it_f047_f049():
    story = Story(definition(rules=()), present={"a": ()})
    story.says(1, "t.read", "t.read", "t.nothing", "t.pay", "t.put", "t.close")
    story.report(3, Failed(error=ev.Trouble(kind="gone", message="no file")))
    story.done(2)
    story.answer("allow")
    story.restart(1)
    story.go()
    unknown = next(n for n, a in enumerate(story.opened()) if a.kind == "unknown_outcome")
    story.answer("abandon", place=unknown)
    story.answer("deny")
    story.answer("allow")
    story.done(7)
    assert [step for step, _ in results(story)] == [sid(n) for n in range(2, 8)]
    assert [text[:14] for _, text in results(story)] == [
        "done", "Failed (gone):", "Not run: There", "Unknown outcom", "Not run: a per", "done",
    ]  # fmt: skip
    assert [m.role for m in story.state.messages] == ["user", "assistant"] + ["tool"] * 6
    assert story.doing() == [8]


def test_calls_with_the_same_provider_id_are_different_steps_f051():
    story = Story()
    story.says(1, "t.put", "t.put")
    story.done(2)
    story.done(3)
    story.says(4, "t.put")
    keys = [e.key for e in story.events if isinstance(e, ev.ToolStarted)]
    assert len(set(keys)) == 3
    assert {m.provider_id for m in story.state.messages if m.role == "tool"} == {"same"}


def test_a_call_that_cannot_be_run_as_asked_is_told_to_the_model_and_runs_nothing():
    story = Story()
    broken = AskedCall(tool="t.put", arguments={}, problem="The arguments are not a JSON object.")
    story.report(1, ModelReply(calls=(broken,)))
    assert story.doing() == [3]
    assert results(story) == [(sid(2), "Not run: The arguments are not a JSON object.")]


def test_the_request_hash_chains_over_all_that_the_model_is_shown_and_is_the_same_at_every_attempt_s0_27():
    story = Story()
    story.says(1, "t.read", "t.put")
    story.done(2)
    story.done(3)
    for _ in range(3):
        story.restart(1)
        story.go()
    hashes = [e.request_hash for e in story.events if isinstance(e, ev.ModelCallStarted) and e.step_id == sid(4)]
    chain = digest_of(story.state.definition)
    for message in story.state.messages:
        chain = digest_of([chain, message])
    assert hashes == [chain] * 4


def test_results_that_arrive_in_another_order_give_the_same_context():
    def told(order: tuple[int, int]) -> Any:
        story = Story()
        story.says(1, "t.read", "t.read")
        for n in order:
            story.done(n)
        return story.state.context_hash, story.state.messages

    assert told((2, 3)) == told((3, 2))


def test_an_accepted_answer_is_never_asked_for_again():
    story = Story()
    story.says(1, "t.read")
    for _ in range(3):
        story.restart(1)
        story.go()
    assert [a.step_id for a in story.performed if type(a).__name__ == "ModelAction"] == [sid(1)]


def test_the_last_word_is_the_output_of_the_run():
    story = Story()
    story.says(1, text="The end.")
    assert (story.status, story.state.output) == ("completed", "The end.")
    assert story.kinds()[-2:] == ["ModelAnswered", "RunCompleted"]


def test_the_step_that_ends_the_run_is_answered_in_the_commit_that_ends_it():
    story = Story(drive="manual")
    story.asked("s", StepCommand())
    story.says(1, text="The end.")
    assert story.kinds()[-3:] == ["ModelAnswered", "RequestSettled", "RunCompleted"]
    assert story.state.run_id == RUN
    assert DONE["content"]


DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("blobs", "content", "kept"),
    [
        ((DIGEST,), {}, (DIGEST,)),
        ((), {"outputFile": "/elsewhere/blobs/x", "outputSha256": DIGEST}, (DIGEST,)),  # before events had `blobs`
        ((), {"outputSha256": DIGEST}, ()),  # it was counted, and not kept
        ((), {"outputFile": "x", "outputSha256": "../../etc"}, ()),
        ((), {"outputFile": "x", "outputSha256": 7}, ()),
        ((), [], ()),
    ],
)
def test_a_run_refers_to_the_large_outputs_that_its_results_name(
    blobs: tuple[str, ...], content: object, kept: tuple[str, ...]
):
    state = Story(definition()).state
    result: dict[str, Any] = {"content": [], "structuredContent": content}
    assert keeping(state, blobs, result).blobs == kept
    assert keeping(keeping(state, blobs, result), blobs, result).blobs == kept
    assert keeping(state, (), None).blobs == ()
