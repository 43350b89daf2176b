"""OpenAI's objects as plain maps: the response resource, its items, usage, logprobs.

Every field that `openresponses-types` or OpenAI's SDK requires is there in every state.
"""

from typing import Any

import msgspec

from hillstar.engine.messages import FinishReason
from hillstar.server.ids import input_item_id
from hillstar.server.items import Message
from hillstar.server.request import CreateResponse


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a response before its first token."""

    response_id: str
    conversation_id: str | None
    created_at: int  # Unix seconds
    model: str  # the name to show
    request: CreateResponse


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ended. The number of output tokens is what was pushed, up to a stop string.

    reason: stop, prefilled -> completed; length -> incomplete; cancelled -> incomplete with the
    status cancelled; refused, error -> failed with `code` and `message`.
    """

    reason: FinishReason
    completed_at: int  # Unix seconds
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    code: str | None = None
    message: str | None = None


_STATUS: dict[FinishReason, str] = {
    "stop": "completed",
    "prefilled": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
    "refused": "failed",
    "error": "failed",
}


def status_of(end: TurnEnd | None) -> str:
    """`in_progress`, `completed`, `incomplete`, `cancelled` or `failed`."""
    return "in_progress" if end is None else _STATUS[end.reason]


def response_object(
    turn: Turn, end: TurnEnd | None, output: list[dict[str, Any]], num_output_tokens: int
) -> dict[str, Any]:
    """The response resource; `end` None: in progress."""
    request = turn.request
    error = None
    if end is not None and end.reason in ("refused", "error"):
        error = {"code": end.code or "server_error", "message": end.message or "The model failed."}
    return {
        "id": turn.response_id,
        "object": "response",
        "created_at": turn.created_at,
        "completed_at": None if end is None else end.completed_at,
        "status": status_of(end),
        "background": request.background,
        "conversation": None if turn.conversation_id is None else {"id": turn.conversation_id},
        "error": error,
        "frequency_penalty": request.frequency_penalty,
        "incomplete_details": (
            {"reason": "max_output_tokens"} if end is not None and end.reason == "length" else None
        ),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": turn.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": request.presence_penalty,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": [],
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None if end is None else _usage(end, num_output_tokens),
        "user": request.user,
    }


def output_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """An assistant message."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one content part of an assistant message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def logprob(token: bytes, value: float, top: list[tuple[bytes, float]]) -> dict[str, Any]:
    """One token's logprob and its most likely alternatives."""
    return {
        **_token_logprob(token, value),
        "top_logprobs": [_token_logprob(other, its) for other, its in top],
    }


def input_items(response_id: str, messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """A response's input messages as items, in the order they were given."""
    return [
        {
            "id": input_item_id(response_id, i),
            "type": "message",
            "status": "completed",
            "role": message.role,
            "content": [
                output_text(part, [])
                if message.role == "assistant"
                else {"type": "input_text", "text": part}
                for part in message.parts
            ],
        }
        for i, message in enumerate(messages)
    ]


def _token_logprob(token: bytes, value: float) -> dict[str, Any]:
    return {
        "token": token.decode("utf-8", "replace"),
        "logprob": max(value, -9999.0),  # JSON has no infinity; OpenAI's floor
        "bytes": list(token),
    }


def _usage(end: TurnEnd, num_output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": end.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": end.num_cached_tokens,
            "cache_write_tokens": end.num_prompt_tokens - end.num_cached_tokens,
        },
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.num_prompt_tokens + num_output_tokens,
    }
