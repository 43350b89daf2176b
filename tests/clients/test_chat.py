"""The terminal chat against a scripted server and a scripted person."""

import asyncio
import io
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest
from rich.console import Console

from hillstar.clients.backoff import Backoff
from hillstar.clients.chat import Chat, ChatConfig, ask_once
from hillstar.clients.client import Client
from hillstar.clients.errors import ClientError
from hillstar.clients.loop_thread import LoopThread
from support.fake_server import ANSWER, FakeServer, Script

T = TypeVar("T")
TEXT = "".join(ANSWER)
Line = str | type[BaseException] | Callable[[], str]


class Person:
    """Types the given lines, then leaves; an exception class is that key pressed."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = iter(lines)
        self.console = Console(file=io.StringIO(), width=100, force_terminal=False)

    def read_line(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        if isinstance(line, type):
            raise line
        return line()

    @property
    def screen(self) -> str:
        file = self.console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()


@contextmanager
def serving(script: Script) -> Iterator[FakeServer]:
    """The fake server on a loop of its own, for clients that block."""
    server = FakeServer(script)
    with LoopThread() as loop:
        loop.run(server.__aenter__())
        try:
            yield server
        finally:
            loop.run(server.__aexit__())


def chat(server: FakeServer, lines: Sequence[Line], thread: LoopThread | None = None) -> str:
    """What the screen shows after a person typed `lines`."""
    person = Person(lines)
    config = ChatConfig(url=server.url, temperature=0.0)
    quick = Backoff(first_s=0.001, max_s=0.01, give_up_s=5.0)

    async def opened() -> Client:
        return await Client(server.url, backoff=quick).__aenter__()

    with thread or LoopThread() as loop:
        client = loop.run(opened())
        try:
            Chat(config, person, client, loop).run()
        finally:
            loop.run(client.__aexit__(None, None, None))
    return person.screen


def test_a_question_is_answered_with_its_figures() -> None:
    """The answer's text and a line of figures are on the screen."""
    with serving(Script()) as server:
        screen = chat(server, ["What is the capital of France?"])
    assert TEXT in screen
    assert "10 tokens" in screen
    assert "3 of 7 prompt tokens cached" in screen
    assert server.creates[0]["temperature"] == 0.0


def test_turns_follow_each_other_and_fork_goes_back() -> None:
    """The second turn names the first; after /fork 1 the next one names the first again."""
    with serving(Script()) as server:
        chat(server, ["one", "two", "/fork 1", "three"])
    parents = [create.get("previous_response_id") for create in server.creates]
    assert parents == [None, "resp_0", "resp_0"]


def test_regenerate_asks_the_last_question_in_its_place() -> None:
    """The same question again, following what the last one followed."""
    with serving(Script()) as server:
        chat(server, ["one", "two", "/regenerate", "three"])
    assert [create["input"] for create in server.creates] == ["one", "two", "two", "three"]
    parents = [create.get("previous_response_id") for create in server.creates]
    assert parents == [None, "resp_0", "resp_0", "resp_2"]


def test_new_follows_nothing() -> None:
    """After /new a question starts a conversation."""
    with serving(Script()) as server:
        chat(server, ["one", "/new", "two"])
    assert "previous_response_id" not in server.creates[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/fork 5", "0 turns"),
        ("/fork x", "no number"),
        ("/regenerate", "no answer yet"),
        ("/what", "no command"),
        ("/help", "/regenerate"),
        ("/turns", "no turns yet"),
    ],
)
def test_a_wrong_command_is_explained_and_the_chat_goes_on(line: str, said: str) -> None:
    """Nothing typed ends the chat but leaving it."""
    with serving(Script()) as server:
        screen = chat(server, [line, "one"])
    assert said in screen
    assert TEXT in screen


def test_a_restart_in_the_middle_of_an_answer_is_not_seen_in_it() -> None:
    """The connection is cut inside the answer; the answer is whole."""
    with serving(Script(cuts=deque([6]), close_code=1012)) as server:
        screen = chat(server, ["one"])
    assert TEXT in screen
    assert server.num_connections == 2


def test_a_refusal_is_one_line_and_the_chat_goes_on() -> None:
    """An error of the server is shown; the next question works."""
    script = Script(refuse={"code": "context_length_exceeded", "message": "too long"})

    def allow() -> str:
        script.refuse = None
        return "two"

    with serving(script) as server:
        screen = chat(server, ["one", allow])
    assert "context_length_exceeded: too long" in screen
    assert TEXT in screen


class Keyboard(LoopThread):
    """A loop whose waits for events are interrupted: before the event of each number given."""

    def __init__(self, *presses: int) -> None:
        super().__init__()
        self._presses = set(presses)

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        return Interrupted(super().iterate(source), self._presses)


class Interrupted(Iterator[T]):
    def __init__(self, inner: Iterator[T], presses: set[int]) -> None:
        self._inner = inner
        self._presses = presses
        self._num_taken = 0

    def __next__(self) -> T:
        if self._num_taken in self._presses:
            self._presses.remove(self._num_taken)
            raise KeyboardInterrupt
        self._num_taken += 1
        return next(self._inner)


def test_the_first_interrupt_cancels_the_answer() -> None:
    """Ctrl-C during an answer keeps what was said, and the next turn follows it."""
    script = Script(hold_after=3)

    def go_on() -> str:
        script.hold_after = None
        return "two"

    with serving(script) as server:
        screen = chat(server, ["one", go_on], Keyboard(3))
    assert server.cancels == ["resp_0"]
    assert "cancelled" in screen
    assert server.creates[1]["previous_response_id"] == "resp_0"


def test_the_second_interrupt_leaves() -> None:
    """Ctrl-C twice during an answer ends the chat, even if the server does not answer."""
    with serving(Script(hold_after=3, deaf=True)) as server:
        chat(server, ["one", "two"], Keyboard(2, 3))
    assert len(server.creates) == 1


def test_two_interrupts_at_the_prompt_leave() -> None:
    """Ctrl-C at the prompt warns; again, it leaves before the next line is read."""
    with serving(Script()) as server:
        screen = chat(server, [KeyboardInterrupt, KeyboardInterrupt, "one"])
    assert "again leaves" in screen
    assert not server.creates


async def test_without_a_terminal_the_answer_alone_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A piped question gives the answer's text and a line end, nothing else."""
    async with FakeServer(Script()) as server:
        await asyncio.to_thread(ask_once, ChatConfig(url=server.url), "hi")
    assert capsys.readouterr().out == TEXT + "\n"


async def test_without_a_terminal_a_refusal_is_an_error() -> None:
    """A refused question raises what the command line reports in one line."""
    script = Script(refuse={"code": "invalid_value", "message": "no"})
    async with FakeServer(script) as server:
        with pytest.raises(ClientError, match="invalid_value: no"):
            await asyncio.to_thread(ask_once, ChatConfig(url=server.url), "hi")
