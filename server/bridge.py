"""The bridge: starts the engine process, carries messages, starts another when one dies.

The engine is a child that holds one end of a Unix socket pair. Its end is the engine's end:
whatever killed it, the socket closes, the process is reaped, the listener hears of it, and after
a back-off the next engine is started. Who has to run again is not the bridge's business.

An engine may also hang without dying. One that says nothing is asked for a heartbeat, which its
loop answers between two steps; one that owes it for too long is ended like a dead one.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import cast

import msgspec

from hillstar.engine.config import DeviceName, EngineConfig
from hillstar.engine.framing import (
    HEARTBEAT,
    FrameReader,
    FramingError,
    decode_from_engine,
    encode_config,
    encode_message,
)
from hillstar.engine.messages import Failed, Frame, FromEngine, Loading, Ready, Shutdown, ToEngine
from hillstar.server.enginelog import EngineLog
from hillstar.server.engineport import EngineEnd, EngineListener

ENGINE_COMMAND = (sys.executable, "-P", "-m", "hillstar.engine.main")
FIRST_DELAY_S = 0.1  # before a dead engine's successor; doubled while none becomes ready
MAX_DELAY_S = 10.0
CLOSE_TIMEOUT_S = 5.0  # for an engine to leave before it is killed
BEAT_S = 5.0  # between two looks at whether the engine has said anything
MAX_SILENCE_S: dict[DeviceName, float] = {"cpu": 600.0, "cuda": 120.0}
"""How long one step may take: a chunk of a large model's prompt takes minutes on a CPU, and on a
GPU the first of a kind compiles its kernels."""
MAX_LOADING_SILENCE_S = 600.0
MAX_UNSENT_BYTES = 4 << 20  # for the engine, encoded; what is more waits as it is

# The threads of a product meet hundreds of times a token. OpenMP lets them wait by spinning,
# which takes the core from the very thread they wait for as soon as anything else runs there: a
# token then took 2.9 s instead of 0.1 s beside four busy processes on two cores. So they spin for
# some microseconds only, then sleep. Only the environment says so, before the library loads.
_THREADS_SLEEP = {"GOMP_SPINCOUNT": "1000"}

log = logging.getLogger(__name__)


class Bridge:
    """Owner of the engine process and the socket to it. Implements `engineport.Engine`."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """`command` gets `--fd N` appended."""
        self._config = config
        self._command = tuple(command)
        self._listener: EngineListener | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: _Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._is_reading = True

    @property
    def pid(self) -> int | None:
        """The engine's process id, while one lives."""
        return self._process.pid if self._process is not None else None

    async def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._task = asyncio.create_task(self._run(listener), name="engine bridge")

    async def close(self) -> None:
        """Ask the engine to leave, kill it when it does not."""
        self._listener = None
        if self._task is None:
            return
        if self._link is not None:
            self._link.send(Shutdown())
        process = self._process
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
            except TimeoutError:
                _kill(process)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def send(self, message: ToEngine) -> None:
        if self._link is not None and self._link.is_ready:
            self._link.send(message)

    def pause_reading(self) -> None:
        self._is_reading = False
        if self._link is not None:
            self._link.set_reading(False)

    def resume_reading(self) -> None:
        self._is_reading = True
        if self._link is not None:
            self._link.set_reading(True)

    async def _run(self, listener: EngineListener) -> None:
        """One engine after the other."""
        delay_s = FIRST_DELAY_S
        while self._listener is not None:
            link = _Link(listener)
            try:
                reason = await self._live(link)
            except OSError as error:  # no memory, no descriptor: there may be some later
                reason = f"it cannot be started: {error}"
            if self._listener is None:
                return
            log.error("the engine ended: %s", reason, extra={"engine_id": link.engine_id})
            listener.engine_down(reason, link.end)
            delay_s = FIRST_DELAY_S if link.is_ready else min(2 * delay_s, MAX_DELAY_S)
            await asyncio.sleep(delay_s)

    async def _live(self, link: "_Link") -> str:
        """One engine from its start to its end; why it ended. Raises OSError: it did not start."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.callback(ours.close)
            our_log, their_log = socket.socketpair()
            unless_it_starts.callback(our_log.close)
            with their_log:
                process = await self._spawn(theirs.fileno(), their_log.fileno())
            unless_it_starts.pop_all()
        self._process = process
        lines = EngineLog()
        beats = asyncio.create_task(self._beat(link), name="engine heartbeat")
        try:
            await loop.create_unix_connection(lambda: lines, sock=our_log)
            await loop.create_unix_connection(lambda: link, sock=ours)
            self._link = link
            link.set_reading(self._is_reading)
            link.write(encode_config(self._config))
            await link.closed
            # The socket is the engine's life: without it, it can only be on its way out.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        finally:
            self._link = self._process = None
            beats.cancel()
            link.abort()
            _kill(process)
            code = await process.wait()
            await lines.close()
        return link.failure or _describe_exit(code)

    async def _beat(self, link: "_Link") -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            link.beat(MAX_SILENCE_S[self._config.device])

    async def _spawn(self, fd: int, log_fd: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            "--fd",
            str(fd),
            pass_fds=(fd,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log_fd,
            env=_THREADS_SLEEP | os.environ,
        )


class _Link(asyncio.Protocol):
    """The socket to one engine: bytes to messages, messages to the listener.

    While the engine is slow to read, messages wait as the objects they are: their token ids are
    their sessions', whose number is bounded, and nothing is copied for the socket's sake.
    """

    def __init__(self, listener: EngineListener) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self.engine_id: str | None = None
        self.failure: str | None = None
        self._has_refused = False
        self._num_silent = 0  # beats since it said anything
        self._listener = listener
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._is_reading = True
        self._is_full = False
        self._waiting: deque[ToEngine] = deque()

    @property
    def end(self) -> EngineEnd:
        """How it ended, once it has."""
        if self.is_ready:
            return "died"
        return "refused" if self._has_refused else "died_loading"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        while self._waiting and not self._is_full:
            self.write(encode_message(self._waiting.popleft()))

    def data_received(self, data: bytes) -> None:
        self._num_silent = 0
        try:
            for payload in self._frames.feed(data):
                if payload:
                    self._receive(decode_from_engine(payload))
        except (FramingError, msgspec.DecodeError) as error:
            self.failure = f"it sent what is no message: {error}"
            self.abort()

    def send(self, message: ToEngine) -> None:
        """Say it once everything before it was said."""
        if self._is_full:
            self._waiting.append(message)
        else:
            self.write(encode_message(message))

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.closed.done():
            self._transport.write(data)

    def set_reading(self, is_reading: bool) -> None:
        if self._transport is None or self.closed.done() or is_reading == self._is_reading:
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def beat(self, max_silence_s: float) -> None:
        """Called every BEAT_S: ask an engine that says nothing, end one that says nothing still.

        Beats are counted, not seconds: where this process slept too, one late beat is one.
        """
        if not self._is_reading:
            self._num_silent = 0
            return
        self._num_silent += 1
        limit_s = max_silence_s if self.is_ready else MAX_LOADING_SILENCE_S
        if self._num_silent * BEAT_S > limit_s:
            self.failure = f"it hangs: no sign of life for {limit_s:g} s"
            self.abort()
        elif self.is_ready and self._num_silent == 1:
            self.write(HEARTBEAT)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Frame():
                if self.is_ready:
                    self._listener.engine_frame(message)
            case Ready():
                self.is_ready = True
                self.engine_id = message.engine_id
                log.info("the engine is ready", extra={"engine_id": message.engine_id})
                self._listener.engine_up(message)
            case Loading():
                self._listener.engine_loading(message.done, message.total)
            case Failed():
                self.failure = message.message
                self._has_refused = True


def _kill(process: asyncio.subprocess.Process) -> None:
    """End it now; it may be gone already."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
