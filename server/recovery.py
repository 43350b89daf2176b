"""What becomes of unfinished turns when their session, or the server, has died.

A session that fails is taken apart (`set_down`) and its turns are taken up again by the next one
(`take_up`), from what the journal holds and from what memory knows of who follows. Where no next
one can be built, everybody is told (`give_up`).
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from hillstar.server.conversation import Services
from hillstar.server.errors import ApiError, server_overloaded
from hillstar.server.history import decode_request
from hillstar.server.live import LiveTurn, Phase
from hillstar.server.reads import Place
from hillstar.server.records import NOT_STORED, TurnRow

encode = msgspec.msgpack.Encoder().encode


def take_up(
    row: TurnRow, before: LiveTurn | None, services: Services, *, is_durable: bool, failed: bool
) -> LiveTurn:
    """A stored turn, queued again; `before`: what it was in a session that failed.

    `failed`: it is to end as failed, with what its followers have been given and no more.
    """
    if failed and before is not None:
        row = replace(row, output_ids=row.output_ids[: 4 * before.stream.num_tokens])
    request = decode_request(row.request)
    stream = services.historian.stream(row, request)
    turn = LiveTurn(row, request, stream, Phase.QUEUED, services.loop.time())
    services.directory.adopt(Place(row.id, row.conversation_id, row.tenant))
    turn.restore(before)
    if before is None:
        turn.is_cancelled = request.on_disconnect == "cancel"
        turn.is_paused = request.on_disconnect == "pause"
    elif failed or not is_durable or row.base_tokens == NOT_STORED:
        turn.prepared = before.prepared
    return turn


def set_down(turns: Sequence[LiveTurn], services: Services) -> tuple[TurnRow, ...]:
    """Stop everything that runs; the rows of the stored turns, as far as memory knows them.

    Creates that still wait for storage are told to try again.
    """
    rows: list[TurnRow] = []
    for turn in turns:
        turn.phase = Phase.ENDED  # here; what is still on its way to it is for nobody
        if turn.sequence is not None:
            services.sequences.discard(turn.sequence)
        if turn.is_stored:
            logprobs = turn.sequence.logprobs if turn.sequence is not None else []
            chunks = (encode(logprobs),) if logprobs else turn.row.logprobs
            said = turn.sequence.output_ids if turn.sequence else turn.row.output_ids
            rows.append(replace(turn.row, output_ids=bytes(said), logprobs=chunks))
        else:
            turn.reject(server_overloaded("The session failed; try again."))
            services.directory.ended(turn.id, keep=False)
    return tuple(rows)


def give_up(turns: Sequence[LiveTurn], services: Services, error: ApiError) -> None:
    """No session follows: answer everybody who still waits."""
    for turn in turns:
        turn.lose(error)
        services.directory.ended(turn.id, keep=False)
