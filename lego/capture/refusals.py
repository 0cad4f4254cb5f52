"""Errors in each dialect's own shape, with the words that harnesses react to."""

from dataclasses import dataclass
from typing import Any

from lego.capture.session import ContextExceeded, LimitReached, SessionClosed
from lego.capture.wire import Dialect
from lego.chat.messages import BadMessage
from lego.errors import EngineError

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "server_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass(eq=False)
class Refused(Exception):
    """A call that gets an error answer."""

    status: int
    message: str
    code: str | None = None


Told = Refused | LimitReached | BadMessage | SessionClosed | EngineError
"""Errors that a harness is told of; any other is a bug of ours."""
TOLD = (Refused, LimitReached, BadMessage, SessionClosed, EngineError)


def refusal(error: Told, dialect: Dialect) -> Refused:
    """What an error means to the harness."""
    match error:
        case Refused():
            return error
        case ContextExceeded():
            return Refused(400, _too_long(error, dialect), "context_length_exceeded")
        case BadMessage():
            return Refused(400, str(error), "invalid_value")
        case LimitReached():
            return Refused(400, f"{error.outcome.value.replace('_', ' ')} reached: {error}", error.outcome.value)
        case SessionClosed():
            return Refused(404, "this trial is over", "trial_closed")
        case EngineError():
            return Refused(503, f"the engine failed: {error}", "engine_error")


def error_body(refused: Refused, dialect: Dialect) -> dict[str, Any]:
    """The error object that the dialect's clients read."""
    if dialect is Dialect.MESSAGES:
        kind = _ANTHROPIC_TYPES.get(refused.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refused.message}}
    kind = _OPENAI_TYPES.get(refused.status, "invalid_request_error")
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def _too_long(error: ContextExceeded, dialect: Dialect) -> str:
    if dialect is Dialect.MESSAGES:
        return f"prompt is too long: {error.found} tokens > {error.limit} maximum"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
        f"{error.found} tokens. Please reduce the length of the messages."
    )
