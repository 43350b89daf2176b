"""An engine without a model, inside the test's event loop, speaking `engine.messages`.

The next token is a function of the tokens before it, as with greedy decoding: whatever was cut,
resumed or resubmitted, the same history goes on in the same way. Tests decide when it steps.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from hillstar.engine.messages import (
    Cancel,
    EngineStats,
    Finish,
    FinishReason,
    Frame,
    Output,
    Park,
    Ready,
    Release,
    Shutdown,
    Submit,
    ToEngine,
    TokenLogprobs,
    Unpark,
    Usage,
    unpack_ids,
)
from hillstar.server.engineport import EngineListener

EOS = 0
VOCAB = range(97, 123)  # letters


def next_token(history: list[int], seed: int) -> int:
    """A letter, or now and then EOS, from everything that was said."""
    digest = hashlib.sha256(repr((history, seed)).encode()).digest()
    return EOS if digest[0] < 4 else VOCAB[digest[1] % len(VOCAB)]


def continuation(prompt: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What the fake says after `prompt`, were EOS ignored."""
    history = list(prompt)
    for _ in range(num_tokens):
        token = next_token(history, seed)
        history.append(VOCAB[0] if token == EOS else token)
    return history[len(prompt) :]


@dataclass(eq=False)
class _Running:
    submit: Submit
    prompt: list[int]
    output: list[int]
    is_parked: bool = False
    num_cached: int = 0
    poisoned: bool = field(default=False)


class FakeEngine:
    """Implements `server.engineport.Engine`.

    `auto`: steps by itself on the loop as long as something runs. Otherwise `step()` does one.
    """

    def __init__(self, *, auto: bool = True, tokens_per_step: int = 1) -> None:
        self.auto = auto
        self.tokens_per_step = tokens_per_step
        self.is_up = False
        self.num_starts = 0
        self.sent: list[ToEngine] = []
        self.released: list[Release] = []
        self.refuse: Callable[[Submit], str | None] = lambda submit: None
        self.poison: Callable[[Submit], bool] = lambda submit: False
        self.restarts = True  # come up again after dying
        self.is_paused = False
        self._listener: EngineListener | None = None
        self._running: dict[str, _Running] = {}
        self._inbox: list[ToEngine] = []
        self._schedule: Callable[[Callable[[], None]], object] | None = None
        self._is_scheduled = False
        self._changed = asyncio.Event()

    async def start(self, listener: EngineListener) -> None:
        self._schedule = asyncio.get_running_loop().call_soon
        self._listener = listener
        self.come_up()

    async def close(self) -> None:
        self._listener = None
        self.is_up = False

    def send(self, message: ToEngine) -> None:
        if not self.is_up:
            return
        self.sent.append(message)
        self._inbox.append(message)
        self._changed.set()
        self._wake()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        self._wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a message to the engine makes true."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @property
    def running(self) -> list[str]:
        """Ids of the sequences it holds."""
        return list(self._running)

    def come_up(self) -> None:
        """A fresh engine is ready."""
        assert self._listener is not None
        self.is_up = True
        self.num_starts += 1
        self._listener.engine_up(
            Ready(
                engine_id=f"engine_{self.num_starts}",
                model="fake",
                num_blocks=64,
                block_size=16,
                max_model_len=4096,
                eos_token_ids=[EOS],
            )
        )

    def die(self) -> None:
        """As by kill -9: everything it held is gone."""
        assert self._listener is not None
        self.is_up = False
        self._running.clear()
        self._inbox.clear()
        self._listener.engine_down("killed", "died")
        if self.restarts and self._listener is not None:
            self.come_up()

    def say(self, stats: EngineStats) -> None:
        """A frame that carries nothing but these counters."""
        assert self._listener is not None
        self._listener.engine_frame(Frame([], stats))

    def step(self) -> bool:
        """Take messages, then one step. False: nothing runs."""
        if not self.is_up or self._listener is None:
            return False
        outputs: list[Output] = []
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._take(message, outputs)
        if any(running.poisoned for running in self._running.values()):
            self.die()
            return True
        active = [running for running in self._running.values() if not running.is_parked]
        for running in active:
            outputs.append(self._advance(running))
        if outputs:
            stats = EngineStats(running=len(active), step_seconds=[0.001])
            self._listener.engine_frame(Frame(outputs, stats))
        return bool(active)

    def _take(self, message: ToEngine, outputs: list[Output]) -> None:
        match message:
            case Submit():
                self._submit(message, outputs)
            case Cancel():
                running = self._running.pop(message.sequence_id, None)
                if running is not None:
                    outputs.append(self._output(running, [], self._finish(running, "cancelled")))
            case Park():
                if message.sequence_id in self._running:
                    self._running[message.sequence_id].is_parked = True
            case Unpark():
                if message.sequence_id in self._running:
                    self._running[message.sequence_id].is_parked = False
            case Release():
                self.released.append(message)
            case Shutdown():
                self.is_up = False

    def _submit(self, submit: Submit, outputs: list[Output]) -> None:
        running = _Running(
            submit,
            unpack_ids(submit.prompt_ids).tolist(),
            unpack_ids(submit.output_ids).tolist(),
            poisoned=self.poison(submit),
        )
        code = self.refuse(submit)
        if code is not None:
            usage = Usage(len(running.prompt), 0, 0)
            outputs.append(self._output(running, [], Finish("refused", usage, code, "Refused.")))
        else:
            self._running[submit.sequence_id] = running

    def _advance(self, running: _Running) -> Output:
        params = running.submit.params
        tokens: list[int] = []
        finish: Finish | None = None
        first = len(running.output)
        while finish is None and len(tokens) < self.tokens_per_step:
            if params.max_tokens == 0:
                finish = self._finish(running, "prefilled")
                break
            token = next_token(running.prompt + running.output, params.seed)
            if token == EOS and (params.ignore_eos or len(running.output) < params.min_tokens):
                token = VOCAB[0]
            running.output.append(token)
            tokens.append(token)
            if token == EOS and not params.ignore_eos:
                finish = self._finish(running, "stop")
            elif len(running.output) >= params.max_tokens:
                finish = self._finish(running, "length")
        if finish is not None:
            del self._running[running.submit.sequence_id]
        return self._output(running, tokens, finish, first)

    def _output(
        self,
        running: _Running,
        tokens: list[int],
        finish: Finish | None,
        first: int | None = None,
    ) -> Output:
        top = running.submit.params.top_logprobs
        logprobs = None
        if top is not None:
            logprobs = [TokenLogprobs(-0.5, [(t, -0.5)][:top]) for t in tokens]
        start = len(running.output) if first is None else first
        return Output(running.submit.sequence_id, start, tokens, logprobs, finish)

    def _finish(self, running: _Running, reason: FinishReason) -> Finish:
        return Finish(reason, Usage(len(running.prompt), 0, len(running.output)))

    def _wake(self) -> None:
        if self.auto and not self._is_scheduled and not self.is_paused and self._schedule:
            self._is_scheduled = True
            self._schedule(self._auto_step)

    def _auto_step(self) -> None:
        self._is_scheduled = False
        if not self.is_paused and self.step():
            self._wake()
