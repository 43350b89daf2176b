"""Stop strings: where an output's text ends, with no more held back than needed."""

from collections.abc import Iterable


class StopMatcher:
    """Finds the first stop string to complete in a growing text.

    The result depends on the characters alone, not on how they were cut: the text ends before the
    stop string that completes first, and before the longest one if several complete at once. Only
    the longest end of the text that begins some stop string is held back.

    Knuth, Morris & Pratt 1977, one automaton a string: O(number of strings) a character.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._patterns)  # characters of each stop string matched now
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to be output, now that `text` has come. "" once stopped."""
        if self.stopped:
            return ""
        known = self._held + text
        for i, char in enumerate(text, len(self._held)):
            complete = self._step(char)
            if complete:
                self.stopped = True
                self._held = ""
                return known[: i + 1 - complete]
        held = max(self._matched, default=0)
        cut = len(known) - held
        self._held = known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """What was held back: nothing more comes, so it is text after all."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Advance every automaton; the length of the longest stop string now complete, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
