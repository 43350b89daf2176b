"""The response as a function of its tokens: one log however they come, valid at every point."""

from collections.abc import Sequence
from typing import Any

import openresponses_types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.messages import FinishReason, TokenLogprobs
from hillstar.server.detokenize import IncrementalDecoder, TokenTable
from hillstar.server.events import Event, ResponseStream, TextDelta, Turn, TurnEnd
from hillstar.server.ids import new_id, output_item_id
from hillstar.server.items import Message
from hillstar.server.request import INCLUDE_LOGPROBS, CreateResponse, HillstarOptions
from hillstar.server.resource import input_items
from hillstar.server.wire import Protocol
from support.events import TERMINAL, as_maps, deltas, text_of, validate, validate_response
from support.tokenizers import SPECIAL_TOKENS, make_tokenizer

TOKENIZER = make_tokenizer()
NAMES = [TOKENIZER.id_to_token(i) for i in range(TOKENIZER.get_vocab_size())]
TABLE = TokenTable(NAMES, frozenset(range(len(SPECIAL_TOKENS))), {"type": "ByteLevel"})
END_OF_TURN = 2
TOKENS = st.lists(st.integers(0, len(NAMES) - 1), max_size=40)
REASONS: tuple[FinishReason, ...] = (
    "stop",
    "length",
    "cancelled",
    "prefilled",
    "refused",
    "error",
)


def turn(**fields: Any) -> Turn:
    request = CreateResponse(input=(Message("user", ("hi",)),), **fields)
    return Turn(
        response_id="resp_5eed",
        conversation_id="conv_1",
        created_at=1_700_000_000,
        model="tiny",
        request=request,
    )


def stream(**fields: Any) -> ResponseStream:
    return ResponseStream(turn(**fields), IncrementalDecoder(TABLE))


def end(reason: FinishReason = "stop", **fields: Any) -> TurnEnd:
    return TurnEnd(
        reason=reason,
        completed_at=1_700_000_009,
        num_prompt_tokens=12,
        num_cached_tokens=8,
        **fields,
    )


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def run(
    token_ids: Sequence[int],
    finish: TurnEnd | None = None,
    sizes: Sequence[int] = (),
    **fields: Any,
) -> list[Event | TextDelta]:
    """The whole log, the tokens pushed in batches of the given sizes (the last repeats)."""
    response = stream(**fields)
    events = response.open()
    sizes = list(sizes) or [1]
    first = 0
    while first < len(token_ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        events += response.push(first, token_ids[first : first + size])
        first += size
    return events + response.finish(finish or end())


@given(token_ids=TOKENS, sizes=st.lists(st.integers(1, 7), max_size=10), data=st.data())
def test_batching_does_not_show(
    token_ids: list[int], sizes: list[int], data: st.DataObject
) -> None:
    """However the tokens are cut into batches, the log is the same, to the sequence number."""
    stops = data.draw(st.lists(st.text("etha nd", min_size=1, max_size=4), max_size=3))
    fields = {"hillstar": HillstarOptions(stop=tuple(stops))}
    assert run(token_ids, sizes=sizes, **fields) == run(token_ids, **fields)


@given(token_ids=TOKENS)
def test_text_is_the_decoded_tokens(token_ids: list[int]) -> None:
    """Deltas joined, output_text.done, the item and a whole decode are one text."""
    events = run(token_ids)
    text = TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert text_of(events) == text
    maps = {event["type"]: event for event in as_maps(events)}
    assert maps["response.output_text.done"]["text"] == text
    [item] = maps["response.completed"]["response"]["output"]
    assert item == maps["response.output_item.done"]["item"]
    assert item["content"] == [maps["response.content_part.done"]["part"]]
    assert item["content"][0]["text"] == text


@given(token_ids=TOKENS, reason=st.sampled_from(REASONS))
def test_every_event_is_valid(token_ids: list[int], reason: FinishReason) -> None:
    """Every event validates against openresponses-types and the openai package."""
    for event in as_maps(run(token_ids, end(reason)), Protocol.OPENAI):
        validate(event)


@given(token_ids=TOKENS, reason=st.sampled_from(REASONS))
def test_numbers_and_terminal(token_ids: list[int], reason: FinishReason) -> None:
    """Sequence numbers count from 0 without gaps; one terminal event, the last, with usage."""
    events = run(token_ids, end(reason))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    terminal = [event for event in as_maps(events) if event["type"] in TERMINAL]
    assert terminal == [as_maps(events)[-1]]
    assert terminal[0]["response"]["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 4},
        "output_tokens": len(token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12 + len(token_ids),
    }


@given(token_ids=TOKENS)
def test_token_cover_is_contiguous(token_ids: list[int]) -> None:
    """Deltas cover the tokens from 0 on without gap or overlap, and the text of each is theirs."""
    covered: list[int] = []
    decoder = IncrementalDecoder(TABLE)
    for delta in deltas(run(token_ids)):
        assert delta.first_token == len(covered)
        part = token_ids[delta.first_token :][: delta.num_tokens]
        covered += part
        text = "".join(map(decoder.push, part))
        assert delta.delta == (text or decoder.flush())
    assert covered == token_ids[: len(covered)]


def test_order_of_events() -> None:
    """The item opens before its first text and closes after its last."""
    types = [event["type"].removeprefix("response.") for event in as_maps(run(encode("the fox")))]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(types[4:-4]) == {"output_text.delta"}
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]


@pytest.mark.parametrize(
    ("reason", "kind", "status", "has_item"),
    [
        ("stop", "completed", "completed", True),
        ("length", "incomplete", "incomplete", True),
        ("cancelled", "incomplete", "cancelled", False),
        ("prefilled", "completed", "completed", False),
        ("refused", "failed", "failed", False),
        ("error", "failed", "failed", False),
    ],
)
def test_endings_without_text(reason: FinishReason, kind: str, status: str, has_item: bool) -> None:
    """Each reason has its terminal event and status; an empty answer is still an answer."""
    last = as_maps(run([], end(reason)))[-1]
    assert last["type"] == f"response.{kind}"
    response = last["response"]
    assert response["status"] == status
    assert bool(response["output"]) == has_item
    assert response["completed_at"] == 1_700_000_009
    details = {"reason": "max_output_tokens"} if reason == "length" else None
    assert response["incomplete_details"] == details


def test_failures_say_why() -> None:
    """A failed response carries the code and the message; what was said stays."""
    finish = end("error", code="server_error", message="The engine failed.")
    response = as_maps(run(encode("the"), finish))[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": "The engine failed."}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "the"


def test_end_of_turn_counts_but_says_nothing() -> None:
    """An end-of-turn token is in usage and in no delta."""
    events = run([*encode("the"), END_OF_TURN])
    assert text_of(events) == "the"
    covered = sum(delta.num_tokens for delta in deltas(events))
    usage = as_maps(events)[-1]["response"]["usage"]
    assert usage["output_tokens"] == covered + 1


def test_characters_are_never_split() -> None:
    """A character of several tokens comes whole, in the delta of the token that completes it."""
    token_ids = [NAMES.index(name) for name in "ðŁķĬ" if name in NAMES]  # U+1F54A, byte by byte
    assert len(token_ids) == 4
    [delta] = deltas(run(token_ids))
    assert (delta.delta, delta.first_token, delta.num_tokens) == ("🕊", 0, 4)
    last = deltas(run(token_ids[:3]))[-1]
    assert (last.delta, last.num_tokens) == ("\N{REPLACEMENT CHARACTER}", 3)


def test_stop_string_ends_the_text() -> None:
    """The text ends before the stop string; its tokens count, later ones are lost."""
    token_ids = [byte_token(char) for char in "abENDcd"]
    response = stream(hillstar=HillstarOptions(stop=("END",)))
    events = response.open() + response.push(0, token_ids)
    assert response.stopped_at == response.num_tokens == 5
    assert response.push(len(token_ids), token_ids) == []
    events += response.finish(end())
    assert text_of(events) == response.text == "ab"
    assert as_maps(events)[-1]["response"]["usage"]["output_tokens"] == 5


def test_no_more_is_held_back_than_may_become_a_stop_string() -> None:
    """Text that could begin a stop string waits, all other text goes out with its token."""
    response = stream(hillstar=HillstarOptions(stop=("END",)))
    response.open()
    sent = [text_of(response.push(i, [byte_token(char)])) for i, char in enumerate("aENxE")]
    assert sent == ["a", "", "", "ENx", ""]
    assert response.stopped_at is None
    last = deltas(response.finish(end("length")))[-1]
    assert (last.delta, last.first_token, last.num_tokens) == ("E", 4, 1)


def test_min_tokens_delay_stop_strings() -> None:
    """A stop string within the first min_tokens tokens is text."""
    token_ids = [byte_token(char) for char in "xxabx"]
    fields = {"hillstar": HillstarOptions(stop=("x",), min_tokens=2)}
    assert text_of(run(token_ids, **fields)) == "xxab"


def test_logprobs_follow_their_tokens() -> None:
    """A delta has the logprobs of the tokens it covers; the item has them all; bytes are exact."""
    response = stream(include=(INCLUDE_LOGPROBS,), top_logprobs=1)
    token_ids = [NAMES.index(name) for name in "ðŁķĬ"] + [byte_token("a")]
    given_logprobs = [
        TokenLogprobs(-0.5, [(token_id, -0.5), (byte_token("z"), -float("inf"))])
        for token_id in token_ids
    ]
    events = response.open() + response.push(0, token_ids, given_logprobs) + response.finish(end())
    assert [len(delta.logprobs) for delta in deltas(events)] == [4, 1]
    logprobs = deltas(events)[0].logprobs
    assert bytes(b for entry in logprobs for b in entry["bytes"]).decode() == "🕊"
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [1, 1, 1, 1]
    for event in as_maps(events, Protocol.OPENAI):
        validate(event)
    content = response.response_object()["output"][0]["content"][0]
    assert content["logprobs"] == [*logprobs, *deltas(events)[1].logprobs]


def test_logprobs_only_where_asked() -> None:
    """Without the include there are none, even if the engine sends them."""
    response = stream()
    response.open()
    [delta] = deltas(response.push(0, [byte_token("a")], [TokenLogprobs(-0.5, [])]))
    assert delta.logprobs == ()


def test_repeated_tokens_are_skipped() -> None:
    """Tokens that were taken before change nothing; a gap is refused."""
    response = stream()
    response.open()
    token_ids = encode("the quick brown fox")
    response.push(0, token_ids[:2])
    again = response.push(0, token_ids[:3])
    assert text_of(again) == TOKENIZER.decode(token_ids[2:3])
    with pytest.raises(AssertionError, match="missing"):
        response.push(4, token_ids)


@given(token_ids=TOKENS, cut=st.integers(0, 40))
def test_response_object_at_any_time(token_ids: list[int], cut: int) -> None:
    """The response is a valid resource at every token, with the text so far."""
    response = stream()
    validate_response(response.response_object())
    events = response.open() + response.push(0, token_ids[:cut])
    resource = response.response_object()
    validate_response(resource)
    assert (resource["status"], resource["usage"]) == ("in_progress", None)
    said = resource["output"][0]["content"][0]["text"] if resource["output"] else ""
    assert said == text_of(events) == response.text
    assert response.log == events


def test_request_is_echoed() -> None:
    """The resource repeats the request's fields, as OpenAI does."""
    response = stream(
        instructions="Be brief.",
        temperature=0.25,
        max_output_tokens=9,
        metadata={"a": "b"},
        store=False,
        previous_response_id="resp_0",
        prompt_cache_key="k",
    ).response_object()
    assert response["id"] == "resp_5eed"
    assert response["conversation"] == {"id": "conv_1"}
    assert response["instructions"] == "Be brief."
    assert (response["temperature"], response["max_output_tokens"]) == (0.25, 9)
    assert (response["metadata"], response["store"]) == ({"a": "b"}, False)
    assert (response["previous_response_id"], response["prompt_cache_key"]) == ("resp_0", "k")


def test_ids() -> None:
    """Fresh ids never repeat; item ids are a function of their response."""
    assert len({new_id("resp") for _ in range(100)}) == 100
    assert new_id("conv").startswith("conv_")
    assert (
        output_item_id("resp_ab", 0) == output_item_id("resp_ab", 0) != output_item_id("resp_ab", 1)
    )


def byte_token(char: str) -> int:
    return NAMES.index(char)


def test_input_items_are_valid() -> None:
    """Input messages read back as items of openresponses-types, their parts by role."""
    messages = (Message("user", ("a", "b")), Message("assistant", ("c",)))
    items = input_items("resp_ab", messages)
    for item in items:
        openresponses_types.Message.model_validate(item)
    assert [[part["text"] for part in item["content"]] for item in items] == [["a", "b"], ["c"]]
    assert [item["content"][0]["type"] for item in items] == ["input_text", "output_text"]
    assert len({item["id"] for item in items}) == 2
