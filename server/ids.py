"""Identifiers: unguessable where they are made, derived where they can be recomputed."""

import secrets
from typing import Literal

IdKind = Literal["resp", "conv"]


def new_id(kind: IdKind) -> str:
    """A fresh `resp_…` or `conv_…` with 192 random bits: unguessable, yet never a credential."""
    return f"{kind}_{secrets.token_hex(24)}"


def output_item_id(response_id: str, output_index: int) -> str:
    """The id of an output item. A function of the response, so that a replay repeats it."""
    return f"msg_{_tail(response_id)}_{output_index}"


def input_item_id(response_id: str, input_index: int) -> str:
    """The id of an input item, as `GET /v1/responses/{id}/input_items` lists it."""
    return f"msg_{_tail(response_id)}_in{input_index}"


def _tail(response_id: str) -> str:
    return response_id.removeprefix("resp_")
