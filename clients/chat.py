"""A chat in the terminal: `hillstar chat`.

With a terminal: prompts, streams answers as Markdown, takes commands. Without one: standard input
is one question, its answer goes to standard output as it comes.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from hillstar.clients.answer import Answer
from hillstar.clients.backoff import Backoff
from hillstar.clients.client import Client, CreateParams
from hillstar.clients.errors import ClientError
from hillstar.clients.events import Finished, TextDelta
from hillstar.clients.loop_thread import LoopThread
from hillstar.clients.stream import Stream
from hillstar.clients.transcript import Transcript, Turn

HELP = """\
/fork [N]     go back to the end of turn N (default: the last but one) and branch off there
/regenerate   answer the last question anew
/turns        list the turns of this branch
/new          start a new conversation
/help         this list
/quit         leave (Ctrl-D too)
Ctrl-C stops an answer; pressed again, it leaves. The up arrow brings earlier lines back."""

PATIENCE = Backoff(give_up_s=300.0)
"""A person sees what is going on and can leave: an outage is ridden out for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Where to chat and with which settings; None leaves them to the server."""

    url: str
    key: str | None = None
    conversation: str | None = None
    instructions: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None

    def params(self) -> CreateParams:
        """The fields that every turn carries."""
        params: CreateParams = {}
        if self.instructions is not None:
            params["instructions"] = self.instructions
        if self.temperature is not None:
            params["temperature"] = self.temperature
        if self.max_output_tokens is not None:
            params["max_output_tokens"] = self.max_output_tokens
        return params


class Screen(Protocol):
    """Where a chat reads lines and what it writes to."""

    console: Console

    def read_line(self) -> str:
        """The next line a person types. Raises EOFError, KeyboardInterrupt."""
        ...


class Terminal:
    """The real terminal, with line editing and history."""

    def __init__(self) -> None:
        import readline  # noqa: F401 - importing it gives `input` its line editing

        self.console = Console()

    def read_line(self) -> str:
        """The next line, after a prompt."""
        return input("\001\033[1;36m\002> \001\033[0m\002")


class Leave(Exception):
    """The person wants to leave."""


class Chat:
    """An interactive chat over one client. Owner of the transcript; `run` blocks."""

    def __init__(
        self, config: ChatConfig, screen: Screen, client: Client, loop: LoopThread
    ) -> None:
        self._config = config
        self._screen = screen
        self._client = client
        self._loop = loop
        self._transcript = Transcript(config.conversation)
        self._commands: dict[str, Callable[[str], None]] = {
            "/fork": self._fork,
            "/regenerate": self._regenerate,
            "/turns": self._turns,
            "/new": self._new,
            "/help": lambda _: self._say(HELP),
            "/quit": self._quit,
        }

    def run(self) -> None:
        """Read and answer lines until the person leaves."""
        self._say(f"{self._config.url} · /help lists the commands")
        interrupted = False
        while True:
            try:
                line = self._screen.read_line().strip()
                interrupted = False
                if line:
                    self.take(line)
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                self._say("\nCtrl-C again leaves")
            except EOFError:
                self._say("")
                return
            except Leave:
                return

    def take(self, line: str) -> None:
        """One line: a command or a question. Raises Leave."""
        name, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self._ask(line, len(self._transcript.turns))
        elif command := self._commands.get(name):
            try:
                command(rest.strip())
            except ValueError as error:
                self._say(str(error))
        else:
            self._say(f"{name} is no command; /help lists them")

    def _ask(self, question: str, num_turns: int) -> None:
        """Ask a question that follows the first `num_turns` turns."""
        parent = self._transcript.parent(num_turns)
        params: CreateParams = {**self._config.params(), **parent, "input": question}
        stream = self._client.stream(**params)
        answer = Answer()
        try:
            self._show(stream, answer)
        except ClientError as error:
            self._screen.console.print(f"{error}", style="red", markup=False, highlight=False)
        finally:
            if answer.text:
                self._screen.console.print(Markdown(answer.text))
        if answer.response is None:
            return
        branched = False
        if answer.response.status != "failed":
            turn = Turn(question, answer.response.id, answer.response.conversation_id)
            branched = self._transcript.put(num_turns, turn)
        self._say(answer.summary() + (" · on a new branch" if branched else ""))

    def _show(self, stream: Stream, answer: Answer) -> None:
        """Follow the stream to its end. The first Ctrl-C cancels it, the second leaves."""
        arrivals = self._loop.iterate(stream)
        cancelled = False
        with Live(answer, console=self._screen.console, transient=True, refresh_per_second=12):
            while not answer.finished:
                try:
                    answer.take(next(arrivals))
                except KeyboardInterrupt:
                    if cancelled:
                        raise Leave from None
                    cancelled = True
                    self._loop.run(stream.cancel())

    def _fork(self, argument: str) -> None:
        num_turns = len(self._transcript.turns)
        kept = int(argument) if argument.isdecimal() else num_turns - 1
        if argument and not argument.isdecimal():
            raise ValueError(f"{argument!r} is no number of a turn")
        self._transcript.back_to(kept)
        self._say(f"the next message follows turn {kept}" if kept else "back at the start")

    def _regenerate(self, _: str) -> None:
        turns = self._transcript.turns
        if not turns:
            raise ValueError("there is no answer yet")
        self._say(f"> {turns[-1].question}")
        self._ask(turns[-1].question, len(turns) - 1)

    def _turns(self, _: str) -> None:
        turns = self._transcript.turns
        for number, turn in enumerate(turns, 1):
            self._say(f"{number:3}  {turn.question[:60]}  {turn.conversation_id or ''}")
        if not turns:
            self._say("no turns yet")

    def _new(self, _: str) -> None:
        self._transcript.clear()
        self._say("a new conversation")

    def _quit(self, _: str) -> None:
        raise Leave

    def _say(self, text: str) -> None:
        self._screen.console.print(text, style="dim", markup=False, highlight=False)


def run_chat(config: ChatConfig) -> None:
    """Chat in this terminal until the person leaves."""
    with LoopThread() as loop:
        client = loop.run(_open(config))
        try:
            Chat(config, Terminal(), client, loop).run()
        finally:
            loop.run(client.__aexit__(None, None, None))


async def _open(config: ChatConfig) -> Client:
    return await Client(config.url, key=config.key, backoff=PATIENCE).__aenter__()


def ask_once(config: ChatConfig, question: str) -> None:
    """Print the answer to one question as it comes. Raises ClientError."""
    asyncio.run(_ask_once(config, question))


async def _ask_once(config: ChatConfig, question: str) -> None:
    parent = Transcript(config.conversation).parent(0)
    params: CreateParams = {**config.params(), **parent, "input": question}
    async with Client(config.url, key=config.key) as client:
        async for event in client.stream(**params):
            if isinstance(event, TextDelta):
                sys.stdout.write(event.text)
                sys.stdout.flush()
            elif isinstance(event, Finished) and event.response.status == "failed":
                raise ClientError(f"{event.response.error_code}: {event.response.error_message}")
    sys.stdout.write("\n")
