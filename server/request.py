"""`response.create` and `POST /v1/responses`: any JSON value in, a valid `CreateResponse` out.

Three kinds of documented fields (docs/protocol.md): those that work, those that cannot change
the answer here (accepted, echoed where OpenAI echoes them), and those that would change it and
are not supported (refused by name). Everything else is an unknown parameter: nothing is ignored
in silence. Every refusal is an `ApiError` that names the parameter, its value and what is allowed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hillstar.server.errors import ApiError, invalid, unknown_parameter, unsupported_parameter

Surface = Literal["http", "socket", "hillstar"]
"""Where a create came from: a POST, OpenAI's socket, a socket with a `hillstar.v1.*` protocol."""

Role = Literal["system", "developer", "user", "assistant"]
OnDisconnect = Literal["continue", "cancel", "pause"]

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_SESSION = "hillstar.session"

_MAX_INT = (1 << 31) - 1
_Count = Annotated[int, Meta(ge=0, le=_MAX_INT)]
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Label = Annotated[str, Meta(max_length=512)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Message(msgspec.Struct, frozen=True):
    """One input message: its role and the texts of its content parts, in order."""

    role: Role
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """What the chat template sees: the parts, a line each."""
        return "\n".join(self.parts)


class HillstarOptions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The body's `hillstar` object (PROTOCOL.md, section 3)."""

    on_disconnect: OnDisconnect | None = None  # None: continue if stored, else cancel
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # larger is more urgent
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    top_k: _Count = 0  # 0 = off
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...], Meta(max_length=16)
    ] = ()
    ignore_eos: bool = False
    min_tokens: _Count = 0
    draft: Annotated[str, Meta(min_length=1, max_length=256)] = "auto"
    category: Annotated[str, Meta(max_length=64)] = ""
    client_event_id: _Id | None = None


class CreateResponse(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A create request, validated and normalised; null means the default everywhere.

    It can be stored as it is (`msgspec.msgpack`) and read back by type.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # None: the default
    input: tuple[Message, ...] = ()
    instructions: str | None = None
    previous_response_id: _Id | None = None
    conversation: _Id | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    generate: bool = True  # False: prefill and keep the KV (sockets only)
    max_output_tokens: Annotated[int, Meta(ge=1, le=_MAX_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    include: tuple[str, ...] = ()
    hillstar: HillstarOptions = HillstarOptions()
    # Accepted and echoed: they cannot change the answer here.
    metadata: Annotated[
        dict[
            Annotated[str, Meta(min_length=1, max_length=64)],
            Annotated[str, Meta(max_length=512)],
        ],
        Meta(max_length=16),
    ] = {}
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Meta(ge=1, le=_MAX_INT)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = None
    safety_identifier: _Label | None = None
    user: _Label | None = None
    prompt_cache_key: _Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether deltas and items carry logprobs (`top_logprobs` alternatives each)."""
        return INCLUDE_LOGPROBS in self.include

    @property
    def on_disconnect(self) -> OnDisconnect:
        """What to do when nobody follows: as asked, else go on if stored."""
        return self.hillstar.on_disconnect or ("continue" if self.store else "cancel")


def parse_create(body: object, *, surface: Surface) -> CreateResponse:
    """Validate the body of a create. Raises ApiError and nothing else."""
    raise NotImplementedError
