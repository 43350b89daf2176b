"""Logs as JSON lines: one object a record, with the ids it is about and never a prompt's text."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request (or upgrade) whose task this is; "" outside of one."""

ID_FIELDS = ("conversation_id", "response_id", "engine_id", "tenant", "peer")
"""The fields a record may carry through `extra=`; whatever else is there is not written."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        for name in ID_FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: int = logging.INFO) -> None:
    """Send every logger's records to stderr as JSON. Called once, by the entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
