"""A text layer whose token ids are code points and whose template is two brackets a message."""

import threading

from hillstar.engine.messages import pack_ids, unpack_ids
from hillstar.server.errors import context_length_exceeded, invalid
from hillstar.server.prompt import ParentContext, Prompt
from hillstar.server.request import CreateResponse

REFUSED = "(refused by the template)"


class Letters:
    """Token ids are code points; 0 is the end of the turn and yields no text."""

    def push(self, token_id: int) -> str:
        return chr(token_id) if token_id else ""

    def flush(self) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class FakeText:
    """Implements `server.history.TextLayer`. With `gate` cleared, prompts wait for it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # a prompt waits at the cleared gate

    def decoder(self) -> Letters:
        return Letters()

    def build_prompt(
        self, parent: ParentContext | None, request: CreateResponse, *, max_model_len: int
    ) -> Prompt:
        """The parent's ids, or, where instructions changed, everything afresh."""
        if not self.gate.is_set():
            self.entered.set()
            self.gate.wait(60)
        new = "".join(f"[{message.text}]" for message in request.input)
        if REFUSED in new:
            raise invalid("The template refuses this.", "input")
        head = [ord(c) for c in f"<{request.instructions or ''}>"]
        if parent is None:
            inherited: list[int] = []
            ids = head + [ord(c) for c in new]
        else:
            last = parent.turns[-1].output_ids or b""
            inherited = unpack_ids(parent.prompt_ids).tolist() + unpack_ids(last).tolist()
            if parent.instructions == request.instructions:
                ids = inherited + [ord(c) for c in new]
            else:
                ids = head
                for turn in parent.turns:
                    ids = ids + [ord(c) for message in turn.messages for c in f"[{message.text}]"]
                    ids = ids + unpack_ids(turn.output_ids or b"").tolist()
                ids = ids + [ord(c) for c in new]
        if len(ids) >= max_model_len:
            raise context_length_exceeded(len(ids), max_model_len)
        shared = 0
        for mine, theirs in zip(ids, inherited, strict=False):
            if mine != theirs:
                break
            shared += 1
        return Prompt(prompt_ids=pack_ids(ids), num_tokens=len(ids), num_inherited=shared)
