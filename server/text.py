"""Text and token ids: the tokenizer, and prompts as ids (DESIGN.md, rule 1).

A prompt is built from ids: the parent's prompt, its sampled output, and what the chat template
adds. Sampled ids are never decoded and encoded again. Everything here is pure and synchronous;
callers run it in a thread pool.
"""

from pathlib import Path

import msgspec

from hillstar.server.events import TextDecoder
from hillstar.server.items import Message
from hillstar.server.request import CreateResponse


class PastTurn(msgspec.Struct, frozen=True):
    """One turn of the history: the messages it added, and what the model said (int32 bytes).

    output_ids is None for a turn that only prefilled (`generate: false`): it said nothing.
    """

    messages: tuple[Message, ...]
    output_ids: bytes | None


class ParentContext(msgspec.Struct, frozen=True, kw_only=True):
    """The chain that a new turn continues: all its turns, oldest first.

    instructions and prompt_ids are the last turn's: prompt_ids + its output_ids are the tokens
    whose KV exists.
    """

    turns: tuple[PastTurn, ...]
    instructions: str | None
    prompt_ids: bytes


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt ready to submit (`engine.messages.Submit.prompt_ids`).

    The next turn needs: this prompt's ids, the request's `input` and `instructions`, the output
    ids. Its first `num_inherited` tokens are those of the parent's prompt + output, so a journal
    need only store the rest.
    """

    prompt_ids: bytes  # little-endian int32
    num_tokens: int
    num_inherited: int


class Tokenizer:
    """The tokenizer and chat template of a model directory. Immutable after loading: any thread."""

    def __init__(self, model_dir: Path) -> None:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it is: no BOS, no template."""
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        raise NotImplementedError

    def decoder(self) -> TextDecoder:
        """A fresh incremental decoder for one response."""
        raise NotImplementedError

    def build_prompt(
        self, parent: ParentContext | None, request: CreateResponse, *, max_model_len: int
    ) -> Prompt:
        """The ids of the next turn. Raises ApiError: the template refuses, or it can never fit."""
        raise NotImplementedError
