"""Stop strings against a definition that sees the whole text at once."""

from hypothesis import given
from hypothesis import strategies as st

from hillstar.server.stops import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, said plainly: the first to complete ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


@given(parts=st.lists(st.text("abc", max_size=4), max_size=12), stops=STOPS)
def test_agrees_with_the_definition(parts: list[str], stops: list[str]) -> None:
    """However the text is cut, it ends before the stop string that completes first."""
    matcher = StopMatcher(stops)
    text = "".join(map(matcher.push, parts)) + matcher.flush()
    assert (text, matcher.stopped) == cut_at_stop("".join(parts), stops)


@given(text=st.text("abc", max_size=20), stops=STOPS)
def test_holds_back_the_least(text: str, stops: list[str]) -> None:
    """What is held back is the longest end of the text that begins a stop string."""
    matcher = StopMatcher(stops)
    sent = matcher.push(text)
    if not matcher.stopped:
        held = text[len(sent) :]
        ends = [text[i:] for i in range(len(text) + 1)]
        assert held == next(e for e in ends if any(stop.startswith(e) for stop in stops))
