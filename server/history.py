"""From stored turns to the context of the next one, off the event loop.

A turn's prompt is put together from its parent's: the first `base_tokens` ids of the parent's
prompt and output, then its own. Where a prompt was forgotten (an earlier turn was erased), it is
rendered afresh from what remains.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from hillstar.engine.messages import SamplingParams, TokenLogprobs
from hillstar.server import reads
from hillstar.server.errors import previous_response_not_found
from hillstar.server.events import Event, ResponseStream, TextDecoder, TextDelta, Turn, TurnEnd
from hillstar.server.journal import Journal
from hillstar.server.records import NOT_STORED, TurnRow
from hillstar.server.request import CreateResponse
from hillstar.server.text import ParentContext, PastTurn, Prompt

TEXT_THREADS = 4  # so that two huge prompts do not hold up everybody else

_BUILDS_ON_UNSTORED = "it builds on a response that was not stored"

T = TypeVar("T")

decode_request = msgspec.msgpack.Decoder(CreateResponse).decode
decode_end = msgspec.msgpack.Decoder(TurnEnd).decode
_decode_logprobs = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


class TextLayer(Protocol):
    """What the server needs of the tokenizer (`text.Tokenizer`); called from any thread."""

    def decoder(self) -> TextDecoder: ...

    def build_prompt(
        self, parent: ParentContext | None, request: CreateResponse, *, max_model_len: int
    ) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn ready to run: its prompt, and the context it was built upon."""

    prompt: Prompt
    parent: ParentContext | None


@dataclass(frozen=True, slots=True)
class Recalled:
    """A response that has ended, rebuilt from its tokens."""

    row: TurnRow
    request: CreateResponse
    events: list[Event | TextDelta]
    response: dict[str, Any]


class Historian:
    """Builds prompts and rebuilds ended responses in a small pool of threads."""

    def __init__(
        self, journal: Journal, text: TextLayer, *, model_name: str, max_model_len: int
    ) -> None:
        self._journal = journal
        self._text = text
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    def limit_context(self, max_model_len: int) -> None:
        """The engine's own limit is smaller than was configured."""
        self._max_model_len = min(self._max_model_len, max_model_len)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def prepare(
        self, request: CreateResponse, parent_id: str | None, parent: ParentContext | None
    ) -> Prepared:
        """The prompt of a new turn after `parent_id`, whose context may be at hand already.

        Raises ApiError: previous_response_not_found, and what the text layer refuses.
        """
        rows: tuple[TurnRow, ...] = ()
        if parent is None and parent_id is not None:
            rows = await self._journal.read(reads.load_chain, parent_id)
            if not rows and request.previous_response_id is not None:
                raise previous_response_not_found(parent_id)

        def build() -> Prepared:
            context = self._context(rows) if rows else parent
            prompt = self._text.build_prompt(context, request, max_model_len=self._max_model_len)
            return Prepared(prompt, context)

        return await self._run(build)

    async def restore(self, row: TurnRow) -> Prepared:
        """The prompt of an open turn as it was, from the journal. Raises ApiError."""
        rows = await self._journal.read(reads.load_chain, row.id)
        *before, row = rows  # as it is stored by now: its past may have been erased

        def build() -> Prepared:
            context = self._context(tuple(before)) if before else None
            return Prepared(self._prompt(context, row), context)

        return await self._run(build)

    async def recall(self, row: TurnRow) -> Recalled:
        """The events of a response that has ended."""
        return await self._run(lambda: self._recall(row))

    def stream(self, row: TurnRow, request: CreateResponse) -> ResponseStream:
        """A response's log before its first event."""
        turn = Turn(
            response_id=row.id,
            conversation_id=row.conversation_id,
            created_at=int(row.created_at),
            model=self._model_name,
            request=request,
        )
        return ResponseStream(turn, self._text.decoder())

    def sampling(self, request: CreateResponse, seed: int, num_prompt: int) -> SamplingParams:
        """How the engine shall choose this turn's tokens."""
        room = self._max_model_len - num_prompt
        options = request.hillstar
        if request.wants_logprobs:
            room = min(room, request.max_logprob_tokens)
        max_tokens = room if request.max_output_tokens is None else request.max_output_tokens
        return SamplingParams(
            max_tokens=max_tokens if request.generate else 0,
            max_tokens_is_explicit=request.max_output_tokens is not None,
            temperature=request.temperature,
            top_k=options.top_k,
            top_p=request.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            ignore_eos=options.ignore_eos,
            min_tokens=options.min_tokens,
            seed=seed,
            top_logprobs=request.top_logprobs if request.wants_logprobs else None,
        )

    def _context(self, rows: tuple[TurnRow, ...]) -> ParentContext:
        """Fold a chain, oldest first, into the context of what comes after it."""
        context: ParentContext | None = None
        for row in rows:
            if row.base_tokens == NOT_STORED:
                raise previous_response_not_found(rows[-1].id, _BUILDS_ON_UNSTORED)
            prompt = self._prompt(context, row)
            context = continued(
                context, decode_request(row.request), prompt.prompt_ids, row.output_ids
            )
        assert context is not None, "a chain has at least one turn"
        return context

    def _prompt(self, context: ParentContext | None, row: TurnRow) -> Prompt:
        """A stored turn's prompt after `context`."""
        if row.base_tokens == NOT_STORED:
            raise previous_response_not_found(row.parent_id or row.id, _BUILDS_ON_UNSTORED)
        if row.prompt_ids is None:
            request = decode_request(row.request)
            return self._text.build_prompt(context, request, max_model_len=self._max_model_len)
        base = b""
        if row.base_tokens:
            assert context is not None, f"{row.id} builds on a turn that is not there"
            output = context.turns[-1].output_ids or b""
            base = (context.prompt_ids + output)[: 4 * row.base_tokens]
        ids = base + row.prompt_ids
        return Prompt(prompt_ids=ids, num_tokens=len(ids) // 4, num_inherited=row.base_tokens)

    def _recall(self, row: TurnRow) -> Recalled:
        assert row.finish is not None, f"{row.id} has not ended"
        request = decode_request(row.request)
        stream = self.stream(row, request)
        events = stream.open()
        events += push_all(stream, row)
        events += stream.finish(decode_end(row.finish))
        return Recalled(row, request, events, stream.response_object())

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def continued(
    context: ParentContext | None, request: CreateResponse, prompt_ids: bytes, output_ids: bytes
) -> ParentContext:
    """The context after a turn that built on `context`."""
    turn = PastTurn(request.input, output_ids if request.generate else None)
    return ParentContext(
        turns=(*(context.turns if context is not None else ()), turn),
        instructions=request.instructions,
        prompt_ids=prompt_ids,
    )


def push_all(stream: ResponseStream, row: TurnRow) -> list[Event | TextDelta]:
    """Push a row's stored tokens."""
    ids = memoryview(row.output_ids).cast("i").tolist()
    return stream.push(0, ids, stored_logprobs(row)) if ids else []


def stored_logprobs(row: TurnRow) -> list[TokenLogprobs] | None:
    """A row's logprobs, one for each output token; None where they were not asked for."""
    if not row.logprobs:
        return None
    return [entry for chunk in row.logprobs for entry in _decode_logprobs(chunk)]
