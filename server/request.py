"""`response.create` and `POST /v1/responses`: any JSON value in, a valid `CreateResponse` out.

Three kinds of documented fields (docs/protocol.md): those that work, those that cannot change
the answer here (accepted, echoed where OpenAI echoes them), and those that would change it and
are not supported (refused by name). Everything else is an unknown parameter: nothing is ignored
in silence. Every refusal is an `ApiError` that names the parameter, its value and what is allowed.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hillstar.server.defaults import (
    NO_DEFAULTS,
    MinP,
    ModelDefaults,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from hillstar.server.errors import invalid, unknown_parameter, unsupported_parameter
from hillstar.server.items import Message, parse_input
from hillstar.server.validate import convert, kind_of, missing, shown, wrong_type

Surface = Literal["http", "socket", "hillstar"]
"""Where a create came from: a POST, OpenAI's socket, a socket with a `hillstar.v1.*` protocol."""

OnDisconnect = Literal["continue", "cancel", "pause"]

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_SESSION = "hillstar.session"

MAX_LOGPROBS = 1 << 15
"""Of one response, alternatives included. Each takes 400 to 700 bytes while the response is in
memory, and 50 to 80 in each of the four events at its end that repeat them all."""

_MAX_INT = (1 << 31) - 1
_Count = Annotated[int, Meta(ge=0, le=_MAX_INT)]
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Label = Annotated[str, Meta(max_length=512)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]

Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], _Label], Meta(max_length=16)
]
"""Of a response or a conversation: up to 16 short names with texts."""


class HillstarOptions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The body's `hillstar` object (PROTOCOL.md, section 3)."""

    on_disconnect: OnDisconnect | None = None  # None: continue if stored, else cancel
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # larger is more urgent
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)
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
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    include: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    hillstar: HillstarOptions = HillstarOptions()
    # Accepted and echoed: they cannot change the answer here.
    metadata: Metadata = {}
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Meta(ge=1, le=_MAX_INT)] | None = None
    service_tier: (
        Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"] | None
    ) = None
    safety_identifier: _Label | None = None
    user: _Label | None = None
    prompt_cache_key: _Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether deltas and items carry logprobs (`top_logprobs` alternatives each)."""
        return INCLUDE_LOGPROBS in self.include

    @property
    def max_logprob_tokens(self) -> int:
        """How many output tokens may carry as many logprobs as are asked for; 0: none are."""
        return MAX_LOGPROBS // (1 + self.top_logprobs) if self.wants_logprobs else 0

    @property
    def on_disconnect(self) -> OnDisconnect:
        """What to do when nobody follows: as asked, else go on if stored."""
        return self.hillstar.on_disconnect or ("continue" if self.store else "cancel")


# Documented, and without effect on an answer of ours: taken, and not kept.
_WITHOUT_EFFECT = frozenset({"image", "stream_options"})

# Documented, and not supported: refused with a reason.
_UNSUPPORTED = {
    "access_programs": "there are no access programs here",
    "background_options": "background responses run as soon as they can",
    "context_management": "history is never compacted",
    "moderation": "there is no moderation model",
    "prompt": "prompts are not stored here; send `input` and `instructions`",
}

# Documented, and supported as far as a value leaves the answer as it is: (allowed, why not).
_ONLY_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), "this model is not given tools; leave it out or send []"),
    "tool_choice": (
        ("auto", "none"),
        "there are no tools to choose; 'auto' and 'none' are allowed",
    ),
    "truncation": (
        ("disabled",),
        "a prompt is never cut to fit; only 'disabled' is allowed",
    ),
}

_FIELDS = frozenset(CreateResponse.__struct_fields__)
_DOCUMENTED = (
    _FIELDS
    | _WITHOUT_EFFECT
    | _UNSUPPORTED.keys()
    | _ONLY_NEUTRAL.keys()
    | {"text", "reasoning", "prompt_cache_options"}
)
_SOCKET_ONLY = "generate"


def parse_create(
    body: object, *, surface: Surface, defaults: ModelDefaults = NO_DEFAULTS
) -> CreateResponse:
    """Validate the body of a create. Raises ApiError and nothing else."""
    fields = _known_fields(body, surface)
    fields["input"] = parse_input(fields.get("input", ()))
    for name, why in _UNSUPPORTED.items():
        if name in fields:
            raise unsupported_parameter(name, why)
    for name, (allowed, why) in _ONLY_NEUTRAL.items():
        if name in fields and fields[name] not in allowed:
            raise unsupported_parameter(name, why)
    _check_text(fields.pop("text", None))
    _check_reasoning(fields.pop("reasoning", None))
    _check_cache_options(fields.pop("prompt_cache_options", None))
    if "conversation" in fields:
        fields["conversation"] = _conversation_id(fields["conversation"])
    if isinstance(options := fields.get("hillstar"), dict):
        fields["hillstar"] = _normal_options(options)
    fields = {name: value for name, value in fields.items() if name in _FIELDS}
    fields = defaults.fill(fields)
    request = convert(fields, CreateResponse)
    _check_whole(request, surface)
    return request


def _known_fields(body: object, surface: Surface) -> dict[str, Any]:
    """The body without its nulls, every name of it documented."""
    if not isinstance(body, dict):
        raise invalid(f"The body must be an object, not {kind_of(body)}.", code="invalid_type")
    for name in body:
        if name not in _DOCUMENTED or (surface == "http" and name == _SOCKET_ONLY):
            raise unknown_parameter(shown(name))
    return {name: value for name, value in body.items() if value is not None}


def _check_text(text: object) -> None:
    if text is None:
        return
    if not isinstance(text, dict):
        raise wrong_type("text", text, "an object")
    for name, value in text.items():
        if name == "format":
            kind = value.get("type") if isinstance(value, dict) else value
            if kind not in ("text", None) or (isinstance(value, dict) and value.keys() != {"type"}):
                raise unsupported_parameter("text.format", 'only {"type": "text"} is allowed')
        elif name == "verbosity":
            if value not in (None, "medium"):
                raise unsupported_parameter("text.verbosity", "only 'medium' is allowed")
        else:
            raise unknown_parameter(shown(f"text.{name}"))


def _check_reasoning(reasoning: object) -> None:
    if reasoning is None:
        return
    if not isinstance(reasoning, dict):
        raise wrong_type("reasoning", reasoning, "an object")
    for name, value in reasoning.items():
        if name not in ("effort", "summary", "generate_summary", "encrypted_content"):
            raise unknown_parameter(shown(f"reasoning.{name}"))
        if value is not None:
            raise unsupported_parameter(f"reasoning.{name}", "this model does not reason apart")


def _check_cache_options(options: object) -> None:
    """Where the prompt cache keeps what cannot change the answer; `prewarm` would."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise wrong_type("prompt_cache_options", options, "an object")
    for name, value in options.items():
        if name == "prewarm":
            if value not in (None, False):
                raise unsupported_parameter(
                    "prompt_cache_options.prewarm", "send `generate: false` on a socket instead"
                )
        elif name not in ("mode", "ttl", "comparison_response_id"):
            raise unknown_parameter(shown(f"prompt_cache_options.{name}"))


def _conversation_id(value: object) -> object:
    if not isinstance(value, dict):
        return value
    for name in value:
        if name != "id":
            raise unknown_parameter(shown(f"conversation.{name}"))
    if "id" not in value:
        raise missing("conversation.id")
    if not isinstance(value["id"], str):
        raise wrong_type("conversation.id", value["id"], "a string")
    return value["id"]


def _normal_options(options: dict[Any, Any]) -> dict[Any, Any]:
    """The `hillstar` object without its nulls, `stop` as a list."""
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return options


def _check_whole(request: CreateResponse, surface: Surface) -> None:
    """The rules that join several fields."""
    if request.previous_response_id is not None and request.conversation is not None:
        raise invalid(
            "'previous_response_id' and 'conversation' exclude each other: send one of them.",
            "previous_response_id",
            "mutually_exclusive_parameters",
        )
    for name in request.include:
        if name == INCLUDE_SESSION and surface == "hillstar":
            continue
        if name != INCLUDE_LOGPROBS:
            raise unsupported_parameter("include", f"{shown(name)!r}; only '{INCLUDE_LOGPROBS}' is")
    if surface != "http" and request.background:
        raise unsupported_parameter("background", "a socket's responses run while it is open")
    options = request.hillstar
    if options.draft not in ("auto", "off"):
        raise unsupported_parameter(
            "hillstar.draft", f"there is no draft {shown(options.draft)!r}; 'auto' and 'off' exist"
        )
    limit = request.max_output_tokens
    if limit is not None and options.min_tokens > limit:
        raise invalid(
            f"'hillstar.min_tokens' is {options.min_tokens}; at most max_output_tokens ({limit}).",
            "hillstar.min_tokens",
        )
    most = request.max_logprob_tokens
    if limit is not None and most and limit > most:
        raise invalid(
            f"'max_output_tokens' is {limit}; with logprobs and {request.top_logprobs} alternatives"
            f" at most {most}.",
            "max_output_tokens",
        )
    starts = request.previous_response_id is None and request.conversation is None
    if starts and not request.input and request.instructions is None:
        raise missing("input")
