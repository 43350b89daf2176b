"""Prompts as token ids (DESIGN.md, rule 1): what was sampled is never decoded and encoded again.

Method. The whole history is rendered by the chat template with a *slot*, an unguessable string, in
place of each sampled output. If the new rendering is the parent's rendering, the parent's slot,
and something more, then the prompt is the parent's prompt ids, its output ids, and the ids of that
something. Otherwise (new instructions, a template that rewrites the past) the text between slots
is encoded afresh and the sampled ids are put in their places; what still agrees is shared up to
the first difference.

The name of a special token in a client's text is text: it gets a slot too, filled with the ids of
its characters, so no message can end its own turn or open another.
"""

import re
import secrets
from collections.abc import Callable

import msgspec
import numpy as np

from hillstar.engine.messages import pack_ids, unpack_ids
from hillstar.server.errors import context_length_exceeded, invalid
from hillstar.server.items import Message
from hillstar.server.request import CreateResponse
from hillstar.server.template import ChatMessage, ChatTemplate, TemplateRefusal

_NO_IDS = np.empty(0, np.int32)
_SLICE = 1 << 16  # characters


class PastTurn(msgspec.Struct, frozen=True):
    """One turn of the history: the messages it added, and what the model said (int32 bytes).

    output_ids is None for a turn that only prefilled (`generate: false`): it said nothing.
    """

    messages: tuple[Message, ...]
    output_ids: bytes | None


class ParentContext(msgspec.Struct, frozen=True, kw_only=True):
    """The chain that a new turn continues: all its turns (at least one), oldest first.

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


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What building a prompt needs of a tokenizer."""

    encode: Callable[[str], np.ndarray]  # text to int32 ids, names of special tokens understood
    encode_inner: Callable[[str], np.ndarray]  # the same for text that does not begin the prompt
    encode_plain: Callable[[str], np.ndarray]  # the same, names of special tokens are text
    special: dict[str, int]  # name to id
    longest_token_bytes: int  # no token covers more bytes of text than this


class PromptBuilder:
    """Builds prompts for one model. Immutable: any thread."""

    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary
        names = sorted(vocabulary.special, key=len, reverse=True)
        self._special_starts = {name[:2] for name in names}
        self._special_names = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._special_ids = frozenset(vocabulary.special.values())

    def build(
        self, parent: ParentContext | None, request: CreateResponse, *, max_model_len: int
    ) -> Prompt:
        """The ids of the next turn. Raises ApiError: the template refuses, or it can never fit."""
        num_wanted = (request.max_output_tokens or 1) if request.generate else 0
        self._refuse_hopeless(request, num_wanted, max_model_len)
        slots = _Slots()
        new = [self._message(message, slots) for message in request.input]
        if parent is None:
            text = self._render(request.instructions, new, request.generate, slots)
            ids = self._fill(text, slots)
            inherited = _NO_IDS
        else:
            inherited = np.concatenate([unpack_ids(parent.prompt_ids), _output(parent.turns[-1])])
            ids = self._continue(parent, inherited, request, new, slots)
        if not len(ids):
            raise invalid("The model's chat template makes an empty prompt of this input.", "input")
        if len(ids) + num_wanted > max_model_len:
            raise context_length_exceeded(len(ids) + num_wanted, max_model_len)
        return Prompt(
            prompt_ids=pack_ids(ids),
            num_tokens=len(ids),
            num_inherited=_common_prefix(inherited, ids),
        )

    def _refuse_hopeless(
        self, request: CreateResponse, num_wanted: int, max_model_len: int
    ) -> None:
        """Refuse what is far too long before time and memory are spent on all of it.

        First by bytes: no tokenisation can be that short. Then, for large texts, by counting
        tokens slice by slice until they are clearly too many: a cut costs a token or two, so the
        margin makes this safe, and what remains to be encoded whole is as long as the context.
        """
        texts = [part for message in request.input for part in message.parts]
        texts.append(request.instructions or "")
        num_bytes = sum(map(_num_bytes, texts))
        at_least = num_wanted - (-num_bytes // self._vocabulary.longest_token_bytes)
        if at_least > max_model_len:
            raise context_length_exceeded(at_least, max_model_len, is_least=True)
        if num_bytes <= _SLICE:
            return
        at_least = num_wanted - (max_model_len // 16 + 256)
        for text in texts:
            for start in range(0, len(text), _SLICE):
                at_least += len(self._vocabulary.encode_plain(text[start : start + _SLICE]))
                if at_least > max_model_len:
                    raise context_length_exceeded(at_least, max_model_len, is_least=True)

    def _continue(
        self,
        parent: ParentContext,
        inherited: np.ndarray,
        request: CreateResponse,
        new: list[ChatMessage],
        slots: "_Slots",
    ) -> np.ndarray:
        """Parent's tokens and what is new; where the past changed, everything with outputs kept."""
        last = parent.turns[-1]
        past: list[ChatMessage] = []
        for turn in parent.turns[:-1]:
            past += self._turn(turn, slots)
        asked = [self._message(message, slots) for message in last.messages]
        text_before = self._render(
            parent.instructions, past + asked, last.output_ids is not None, slots
        )
        answer = _answer(last, slots)
        head = text_before + "".join(message["content"] for message in answer)
        text = self._render(
            request.instructions, past + asked + answer + new, request.generate, slots
        )
        if text.startswith(head):
            rest = text[len(head) :]
            return self._fill(rest, slots, inherited, is_answered=bool(last.output_ids))
        return self._fill(text, slots)

    def _turn(self, turn: PastTurn, slots: "_Slots") -> list[ChatMessage]:
        messages = [self._message(message, slots) for message in turn.messages]
        return messages + _answer(turn, slots)

    def _message(self, message: Message, slots: "_Slots") -> ChatMessage:
        role = "system" if message.role == "developer" else message.role
        return {"role": role, "content": self._guard(message.text, slots)}

    def _guard(self, text: str, slots: "_Slots") -> str:
        """A client's text with the names of special tokens in slots."""
        if not any(start in text for start in self._special_starts):
            return text
        plain = self._vocabulary.encode_plain
        return self._special_names.sub(lambda name: slots.add(plain(name[0])), text)

    def _render(
        self, instructions: str | None, messages: list[ChatMessage], generate: bool, slots: "_Slots"
    ) -> str:
        if instructions is not None:
            content = self._guard(instructions, slots)
            messages = [{"role": "system", "content": content}, *messages]
        try:
            return self._template.render(messages, add_generation_prompt=generate)
        except TemplateRefusal as refusal:
            raise invalid(
                f"The model's chat template refuses this input: {refusal}", "input"
            ) from None

    def _fill(
        self, text: str, slots: "_Slots", before: np.ndarray = _NO_IDS, *, is_answered: bool = False
    ) -> np.ndarray:
        """Encode the text between slots and fill the slots, after the ids `before`.

        The template closes every answer with an end-of-turn marker. Where the model has generated
        it, it is not written a second time (`is_answered`: `before` ends with generated tokens).
        """
        pieces = [before] if len(before) else []
        for is_slot, piece in slots.split(text):
            if is_slot:
                ids = slots.ids(piece)
            elif pieces:
                ids = self._vocabulary.encode_inner(piece)
                if is_answered and self._is_generated_end(pieces[-1], ids):
                    ids = ids[1:]
            else:
                ids = self._vocabulary.encode(piece)
            is_answered = is_slot and bool(len(ids))
            pieces.append(ids)
        return np.concatenate(pieces) if pieces else _NO_IDS

    def _is_generated_end(self, before: np.ndarray, after: np.ndarray) -> bool:
        is_same = bool(len(after)) and before[-1] == after[0]
        return bool(is_same) and int(after[0]) in self._special_ids


class _Slots:
    """Strings that stand for token ids in one rendering; not to be met by chance or guessed."""

    def __init__(self) -> None:
        self._open = f"\ue000{secrets.token_hex(16)}:"
        self._ids: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> str:
        self._ids.append(ids)
        return f"{self._open}{len(self._ids) - 1}\ue001"

    def ids(self, number: str) -> np.ndarray:
        return self._ids[int(number)]

    def split(self, text: str) -> list[tuple[bool, str]]:
        """(is it a slot, its number or the text), in order, empty texts left out."""
        first, *rest = text.split(self._open)
        parts = [(False, first)]
        for part in rest:
            number, _, after = part.partition("\ue001")
            parts += [(True, number), (False, after)]
        return [part for part in parts if part[1]]


def _output(turn: PastTurn) -> np.ndarray:
    return unpack_ids(turn.output_ids or b"")


def _answer(turn: PastTurn, slots: _Slots) -> list[ChatMessage]:
    """The turn's output as a message whose content is a slot; none if it only prefilled."""
    if turn.output_ids is None:
        return []
    return [{"role": "assistant", "content": slots.add(_output(turn))}]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
