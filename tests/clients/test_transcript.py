"""What a chat's next turn follows."""

import pytest

from hillstar.clients.transcript import Transcript, Turn


def two_turns() -> Transcript:
    transcript = Transcript()
    transcript.put(0, Turn("one", "resp_1", "conv_1"))
    transcript.put(1, Turn("two", "resp_2", "conv_1"))
    return transcript


def test_the_first_turn_follows_nothing_or_the_conversation_named() -> None:
    """Without a conversation there is no parent; with one, the chat goes on at its end."""
    assert Transcript().parent(0) == {}
    assert Transcript("conv_9").parent(0) == {"conversation": "conv_9"}


def test_a_turn_follows_its_predecessor() -> None:
    """Each turn names the response before it."""
    assert two_turns().parent(2) == {"previous_response_id": "resp_2"}


def test_going_back_follows_an_earlier_turn() -> None:
    """After going back, the later turns are forgotten here and the earlier one is the parent."""
    transcript = two_turns()
    transcript.back_to(1)
    assert [turn.question for turn in transcript.turns] == ["one"]
    assert transcript.parent(1) == {"previous_response_id": "resp_1"}


def test_a_turn_put_in_the_middle_replaces_what_followed() -> None:
    """A regenerated turn takes the old one's place, and its own branch is noticed."""
    transcript = two_turns()
    assert transcript.put(1, Turn("two", "resp_3", "conv_2"))
    assert [turn.response_id for turn in transcript.turns] == ["resp_1", "resp_3"]


def test_a_turn_of_the_same_conversation_is_no_branch() -> None:
    """Going on in a conversation is not announced as a branch."""
    assert not two_turns().put(2, Turn("three", "resp_3", "conv_1"))


@pytest.mark.parametrize("num_turns", [-1, 3])
def test_there_is_no_going_back_to_turns_that_are_not_there(num_turns: int) -> None:
    """A number outside the branch is refused and changes nothing."""
    transcript = two_turns()
    with pytest.raises(ValueError, match="2 turns"):
        transcript.back_to(num_turns)
    assert len(transcript.turns) == 2


def test_the_unknown_past_of_a_conversation_cannot_be_named() -> None:
    """A chat that went on with a conversation cannot go back before its own first turn."""
    transcript = Transcript("conv_9")
    transcript.put(0, Turn("one", "resp_1", "conv_9"))
    with pytest.raises(ValueError, match="not known"):
        transcript.back_to(0)


def test_a_new_conversation_forgets_everything() -> None:
    """After clear, a turn follows nothing."""
    transcript = Transcript("conv_9")
    transcript.clear()
    assert transcript.parent(0) == {}
