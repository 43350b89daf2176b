"""The course of one turn: its prompt is built, it is stored, it runs, its end is stored.

PREPARING (in a thread) → OPENING → RUNNING → ENDING → ENDED. A turn that comes while another
lives is stored first, waits QUEUED, and is prepared when its time comes. Nothing is posted to a
follower before what it tells of is stored.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from hillstar.engine.messages import Finish, FinishReason, Output, Submit
from hillstar.server.conversation import Address, Conversation, Services, resolve
from hillstar.server.errors import ApiError
from hillstar.server.history import Prepared, continued, stored_logprobs
from hillstar.server.items import Message
from hillstar.server.live import LiveTurn, Phase
from hillstar.server.mail import Base, EndStored, PromptBuilt, TurnStored
from hillstar.server.ports import Created
from hillstar.server.records import (
    NOT_STORED,
    FinishTurn,
    OpenTurn,
    PlacePrompt,
)
from hillstar.server.resource import TurnEnd
from hillstar.server.sequence import Sequence
from hillstar.server.writer import Fenced

encode = msgspec.msgpack.Encoder().encode
decode_finish = msgspec.msgpack.Decoder(Finish).decode
decode_items = msgspec.msgpack.Decoder(tuple[Message, ...]).decode


class Course:
    """Takes the turns of one conversation through their phases; decides nothing about order."""

    def __init__(
        self,
        services: Services,
        address: Address,
        conversation: Conversation,
        *,
        waits: Callable[[LiveTurn], None],
        left: Callable[[LiveTurn], None],
    ) -> None:
        """`waits(turn)`: it is stored and queued. `left(turn)`: it has ended, or never was."""
        self._services = services
        self._address = address
        self._conversation = conversation
        self._running: LiveTurn | None = None  # the one with a sequence in the engine
        self._waits = waits
        self._left = left

    def prepare(self, turn: LiveTurn, base: Base | None = None) -> None:
        """Build the prompt: as it was, where it forks, or after the end of the conversation."""
        if turn.prepared is not None:
            self._run(turn)
            return
        turn.phase = Phase.PREPARING
        conversation, historian = self._conversation, self._services.historian
        row = turn.row
        is_lost = base is None and row.base_tokens == NOT_STORED  # what it builds on; to be said
        if row.prompt_ids is not None or row.output_ids or is_lost:
            self._build(turn, lambda: historian.restore(row))
            return
        parent_id: str | None
        if base is not None:
            parent_id, context = base.parent_id, base.context
        else:
            parent_id = conversation.last_id or conversation.row.parent_id
            context = conversation.context
        if parent_id is None:
            opening = decode_items(conversation.row.items)
            if opening:
                turn.request = msgspec.structs.replace(
                    turn.request, input=opening + turn.request.input
                )
                turn.row = replace(turn.row, request=encode(turn.request))
        elif (kept := conversation.kept.context(parent_id)) is not None:
            context = kept
            turn.row = replace(turn.row, base_tokens=NOT_STORED)
        turn.row = replace(turn.row, parent_id=parent_id)
        request = turn.request
        self._build(turn, lambda: historian.prepare(request, parent_id, context))

    def _build(self, turn: LiveTurn, work: Callable[[], Awaitable[Prepared]]) -> None:
        async def build() -> None:
            result: Prepared | ApiError
            try:
                result = await work()
            except ApiError as refusal:
                result = refusal
            self._address.tell(PromptBuilt(turn, result))

        self._address.start(build())

    def prompt_built(self, turn: LiveTurn, result: Prepared | ApiError) -> None:
        """The thread is done: store the turn, or refuse it."""
        if turn.phase is Phase.ENDED:
            return
        if isinstance(result, ApiError):
            if not turn.is_stored:
                self._reject(turn, result)
            elif turn.is_cancelled:
                self.end(turn, "cancelled")
            else:
                self.end(turn, "refused", result.code, result.message)
            return
        turn.prepared = result
        if turn.row.prompt_ids is not None or turn.row.output_ids:
            self._run(turn)
            return
        if turn.row.base_tokens != NOT_STORED:
            inherited = result.prompt.num_inherited
            own = result.prompt.prompt_ids[4 * inherited :]
            turn.row = replace(turn.row, base_tokens=inherited, prompt_ids=own)
        self.store(turn)

    def store(self, turn: LiveTurn) -> None:
        """Store the turn as far as it is known."""
        turn.phase = Phase.OPENING
        if not self._conversation.is_durable:
            self.turn_stored(turn, None)
            return
        conversation = self._conversation
        write: OpenTurn | PlacePrompt
        if turn.is_stored:
            write = PlacePrompt(conversation.fence, turn.row)
        else:
            row = None if conversation.is_stored else conversation.row
            write = OpenTurn(conversation.fence, turn.row, row)
        tell = self._address.tell
        self._services.journal.write(write, lambda error: tell(TurnStored(turn, error)))

    def turn_stored(self, turn: LiveTurn, error: Exception | None) -> None:
        """The journal has it (or not): now it is told, and runs if its prompt is there."""
        if turn.phase is Phase.ENDED or isinstance(error, Fenced):
            return
        if isinstance(error, ApiError) and not turn.is_stored:
            self._reject(turn, error)
            return
        if error is not None:
            raise error
        self._conversation.is_stored = True
        if not turn.is_stored:
            turn.is_stored = True
            if turn.answer is not None:
                resolve(turn.answer, Created(turn.id, self._conversation.row.id, False))
                turn.answer = None
            turn.emit(turn.stream.open())
        if turn.prepared is not None:
            self._run(turn)
        else:
            turn.phase = Phase.QUEUED
            if turn.is_cancelled:
                self.end(turn, "cancelled")
            else:
                self._waits(turn)

    def _reject(self, turn: LiveTurn, error: ApiError) -> None:
        """The turn never was: only its create hears of it."""
        turn.phase = Phase.ENDED
        turn.reject(error)
        self._left(turn)

    def _run(self, turn: LiveTurn) -> None:
        """Give it to the engine, unless it turns out to have ended before."""
        turn.phase = Phase.RUNNING
        if turn.stream.stopped_at is not None:
            self.end(turn, "stop")
        elif turn.row.engine_finish is not None:
            self._finished(turn, decode_finish(turn.row.engine_finish))
        elif turn.is_cancelled:
            self.end(turn, "cancelled")
        else:
            self._running = turn
            turn.sequence = self._sequence(turn)
            self._services.sequences.add(turn.sequence)

    def _sequence(self, turn: LiveTurn) -> Sequence:
        conversation, row, prepared = self._conversation, turn.row, turn.prepared
        assert prepared is not None, f"{turn.id} has no prompt"
        num_prompt = prepared.prompt.num_tokens
        return Sequence(
            submit=Submit(
                sequence_id=f"{turn.id}:{conversation.fence.epoch}",
                prompt_ids=prepared.prompt.prompt_ids,
                params=self._services.historian.sampling(turn.request, row.seed, num_prompt),
                priority=turn.request.hillstar.priority,
                tenant=row.tenant,
                salt=_salt(row.tenant),
                lease_id=row.conversation_id,
            ),
            response_id=turn.id,
            conversation_id=row.conversation_id,
            epoch=conversation.fence.epoch,
            key=row.key if conversation.is_durable else None,
            owner=self._address,
            opened_at_s=turn.opened_at_s,
            output_ids=bytearray(row.output_ids),
            logprobs=stored_logprobs(row) or [],
            held=turn.is_paused,
        )

    def arrived(self, sequence: Sequence, output: Output) -> None:
        """Tokens are stored. This is the way of every token: nothing here that can be elsewhere."""
        turn = self._running
        if turn is None or turn.sequence is not sequence:
            return
        stream = turn.stream
        if output.token_ids:
            events = stream.push(output.first_token, output.token_ids, output.logprobs)
            if events:
                turn.emit(events)
        if output.finish is not None:
            self._finished(turn, output.finish)
        elif stream.stopped_at is not None:
            # Wait for the engine's finish: it knows the usage. What it says meanwhile is lost.
            self._services.sequences.cancel(sequence, keep_tokens=stream.stopped_at)

    def _finished(self, turn: LiveTurn, finish: Finish) -> None:
        """The engine has ended the sequence."""
        reason = finish.reason
        if turn.stream.stopped_at is not None:
            reason = "stop"
        elif turn.is_cancelled:
            reason = "cancelled"
        turn.num_cached_tokens = finish.usage.num_cached_tokens
        self.end(turn, reason, finish.code, finish.message)

    def end(
        self,
        turn: LiveTurn,
        reason: FinishReason,
        code: str | None = None,
        message: str | None = None,
    ) -> None:
        """Store the turn's end; it is told when it is stored."""
        turn.phase = Phase.ENDING
        if turn is self._running:
            self._running = None
        turn.end = TurnEnd(
            reason=reason,
            completed_at=int(time.time()),
            num_prompt_tokens=turn.prepared.prompt.num_tokens if turn.prepared else 0,
            num_cached_tokens=turn.num_cached_tokens,
            code=code,
            message=message,
        )
        if not self._conversation.is_durable:
            self.end_stored(turn, None)
            return
        logprobs = turn.output_logprobs()
        write = FinishTurn(
            self._conversation.fence,
            turn.row.key,
            turn.output_ids(),
            encode(logprobs) if logprobs else None,
            turn.joins_history,
            encode(turn.end),
        )
        tell = self._address.tell
        self._services.journal.write(write, lambda error: tell(EndStored(turn, error)))

    def end_stored(self, turn: LiveTurn, error: Exception | None) -> None:
        """Tell everybody of the end."""
        if turn.phase is Phase.ENDED or isinstance(error, Fenced):
            return
        if error is not None:
            raise error
        assert turn.end is not None, f"{turn.id} has no end"
        turn.phase = Phase.ENDED
        turn.emit(turn.stream.finish(turn.end))
        if turn.waiters:
            turn.answer_waiters(turn.stream.response_object())
        if turn.prepared is not None:
            self._remember(turn, turn.prepared)
        self._left(turn)

    def _remember(self, turn: LiveTurn, prepared: Prepared) -> None:
        """Keep the context after this turn for the next."""
        conversation = self._conversation
        context = continued(
            prepared.parent, turn.request, prepared.prompt.prompt_ids, turn.output_ids()
        )
        if turn.joins_history:
            conversation.last_id = turn.id
            conversation.context = None if turn.is_rewritten else context
        is_stored = conversation.is_durable
        if not is_stored or (turn.row.base_tokens == NOT_STORED and not turn.is_rewritten):
            conversation.kept.add(turn, context, is_stored=is_stored)

    def cancel(self, turn: LiveTurn) -> None:
        """End it as soon as where it stands allows; it then ends like any other."""
        if turn.is_cancelled or turn.phase in (Phase.ENDING, Phase.ENDED):
            return
        turn.is_cancelled = True
        if turn.phase is Phase.QUEUED:
            self.end(turn, "cancelled")
        elif turn.phase is Phase.RUNNING:
            assert turn.sequence is not None, f"{turn.id} runs without a sequence"
            self._services.sequences.cancel(turn.sequence)

    def pause(self, turn: LiveTurn) -> None:
        """Have it park, now or as soon as it would run."""
        turn.is_paused = True
        if turn.sequence is not None:
            self._services.sequences.park(turn.sequence)

    def resume(self, turn: LiveTurn) -> None:
        turn.is_paused = False
        if turn.sequence is not None:
            self._services.sequences.unpark(turn.sequence)


def _salt(tenant: str) -> bytes:
    """Part of every block's hash: tenants never share a prefix."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"hillstar-salt").digest()
