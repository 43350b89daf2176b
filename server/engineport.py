"""The engine as the server sees it, wherever it runs: the bridge's process, or a test's fake."""

from typing import Literal, Protocol

from hillstar.engine.messages import Frame, Ready, ToEngine

EngineEnd = Literal["died", "died_loading", "refused"]
"""How an engine ended: while it worked; before it was ready; it said that it cannot start."""


class EngineListener(Protocol):
    """Told on the event loop, in order. A frame always belongs to the engine that is up."""

    def engine_loading(self, done: int, total: int) -> None: ...

    def engine_up(self, ready: Ready) -> None: ...

    def engine_frame(self, frame: Frame) -> None: ...

    def engine_down(self, reason: str, end: EngineEnd) -> None:
        """The engine is gone; another will be started."""
        ...


class Engine(Protocol):
    """Starts engines, one at a time, until it is closed."""

    async def start(self, listener: EngineListener) -> None:
        """Begin; returns while the engine still loads."""
        ...

    async def close(self) -> None:
        """End the engine; the listener hears nothing more."""
        ...

    def send(self, message: ToEngine) -> None:
        """Hand a message over, in order; dropped when no engine is up."""
        ...

    def pause_reading(self) -> None:
        """Take no more frames for now: the journal is behind."""
        ...

    def resume_reading(self) -> None: ...
