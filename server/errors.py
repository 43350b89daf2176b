"""Errors that reach a client.

    ApiError            one class: status, type, code, message, param, retryable

Each is raised where the fault is seen and turned into a frame, an HTTP body or a terminal event
at exactly one place per surface. The constructors below are the whole list of codes
(docs/protocol.md documents each).
"""

from typing import Any


class ApiError(Exception):
    """A typed refusal. `retryable` says whether the same request may succeed later."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.type = type or _type_of(status)
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The `error` object of OpenAI's API."""
        return {
            "type": self.type,
            "code": self.code,
            "message": self.message,
            "param": self.param,
        }


def _type_of(status: int) -> str:
    if status in (401, 403):
        return "authentication_error" if status == 401 else "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


def unknown_parameter(name: str) -> ApiError:
    return ApiError(400, "unknown_parameter", f"Unknown parameter: '{name}'.", param=name)


def unsupported_parameter(name: str, why: str) -> ApiError:
    """A documented field that would change the answer and is not implemented."""
    return ApiError(400, "unsupported_parameter", f"'{name}' is not supported: {why}", param=name)


def previous_response_not_found(response_id: str, why: str = "") -> ApiError:
    """`why`: where the response itself is there, and what came before it is not."""
    return ApiError(
        400,
        "previous_response_not_found",
        f"Previous response with id '{response_id}' not found{': ' if why else ''}{why}.",
        param="previous_response_id",
    )


def response_not_found(response_id: str) -> ApiError:
    return ApiError(404, "response_not_found", f"Response with id '{response_id}' not found.")


def conversation_not_found(conversation_id: str) -> ApiError:
    return ApiError(
        404, "conversation_not_found", f"Conversation with id '{conversation_id}' not found."
    )


def context_length_exceeded(
    num_tokens: int, max_model_len: int, *, is_least: bool = False
) -> ApiError:
    """`is_least`: nobody counted all of them, there may be many more."""
    needs = f"at least {num_tokens}" if is_least else str(num_tokens)
    return ApiError(
        400,
        "context_length_exceeded",
        f"The request needs {needs} tokens; this model's context holds {max_model_len}.",
        param="input",
    )


def server_overloaded(message: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, "server_overloaded", message, retryable=True, retry_after_s=retry_after_s)


def storage_unavailable(message: str) -> ApiError:
    return ApiError(503, "storage_unavailable", message, retryable=True, retry_after_s=5.0)


def rate_limit_exceeded(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429, "rate_limit_exceeded", message, retryable=True, retry_after_s=retry_after_s
    )


def invalid_api_key() -> ApiError:
    return ApiError(401, "invalid_api_key", "Missing or incorrect API key.")


def conflict(code: str, message: str, param: str | None = None) -> ApiError:
    return ApiError(409, code, message, param=param)


def internal_error() -> ApiError:
    """A bug of ours, logged where it was seen; the client learns no more than that."""
    return ApiError(500, "internal_error", "The server failed on this request.", retryable=True)


def server_draining() -> ApiError:
    """The server leaves; the next one on the same data directory goes on."""
    return ApiError(
        503, "server_draining", "The server restarts.", retryable=True, retry_after_s=1.0
    )
