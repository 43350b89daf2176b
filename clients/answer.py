"""One answer on its way: what has come, how fast, and how it looks in a terminal."""

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from hillstar.clients.events import (
    ConnectionLost,
    Created,
    Finished,
    Response,
    Resumed,
    StreamEvent,
    TextDelta,
)


class Answer:
    """Takes a stream's events; a rich renderable meanwhile. Owned by the chat."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.text = ""
        self.response: Response | None = None  # as last seen
        self.finished = False
        self._notice = "…"
        self._clock = clock
        self._began_s = clock()
        self._first_s: float | None = None
        self._last_s = self._began_s

    def take(self, event: StreamEvent) -> None:
        """The next event of the stream."""
        match event:
            case Created():
                self.response = event.response
            case TextDelta():
                self._last_s = self._clock()
                self._first_s = self._first_s or self._last_s
                self.text += event.text
                self._notice = ""
            case Finished():
                self.response = event.response
                self.finished = True
                self._notice = ""
            case ConnectionLost():
                self._notice = "reconnecting…"
            case Resumed():
                self._notice = "" if self.text else "…"
            case _:
                pass

    def summary(self) -> str:
        """One line: tokens, speed, cache."""
        if self.response is None or not self.finished:
            return "no answer"
        usage = self.response.usage
        parts = [f"{usage.output_tokens} tokens"]
        if self._first_s is not None:
            if usage.output_tokens > 1 and self._last_s > self._first_s:
                speed = (usage.output_tokens - 1) / (self._last_s - self._first_s)
                parts.append(f"{speed:.1f} tokens/s")
            parts.append(f"first after {1000 * (self._first_s - self._began_s):.0f} ms")
        parts.append(f"{usage.cached_tokens} of {usage.input_tokens} prompt tokens cached")
        if self.response.status == "incomplete":
            parts.append(f"cut off: {self.response.incomplete_reason}")
        elif self.response.status != "completed":
            parts.append(self.response.error_message or self.response.status)
        return " · ".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last screenful of the text so far, and what is going on."""
        lines = console.render_lines(Markdown(self.text), options, pad=False)
        for line in lines[-max(1, console.height - 3) :] if self.text else []:
            yield from line
            yield Segment.line()
        if self._notice:
            yield Text(self._notice, style="dim")
