"""What is known of the engine: its state, its last words, its counters."""

from hillstar.engine.messages import EngineStats, Frame, Ready
from hillstar.server.history import Historian
from hillstar.server.ports import EngineState, Observer
from hillstar.server.sequences import SequenceTable


class EngineMonitor:
    """Listens to the engine for the Hub and passes what concerns sequences on."""

    def __init__(self, sequences: SequenceTable, historian: Historian, observer: Observer) -> None:
        self._sequences = sequences
        self._historian = historian
        self._observer = observer
        self.state: EngineState = "starting"
        self.loading = (0, 0)
        self.ready: Ready | None = None
        self.error: str | None = None
        self.stats = EngineStats()
        self.num_restarts = 0

    def engine_loading(self, done: int, total: int) -> None:
        self.loading = (done, total)

    def engine_up(self, ready: Ready) -> None:
        self.state = "ready"
        self.ready = ready
        self.stats = EngineStats(blocks_free=ready.num_blocks)  # until its first frame
        self.error = None
        self._historian.limit_context(ready.max_model_len)
        self._sequences.engine_up()

    def engine_frame(self, frame: Frame) -> None:
        self.stats = frame.stats
        for seconds in frame.stats.step_seconds:
            self._observer.step(seconds)
        self._sequences.frame(frame)

    def engine_down(self, reason: str, *, was_up: bool) -> None:
        self.state = "down"
        self.error = reason
        self.stats = EngineStats()
        self.num_restarts += was_up
        self._sequences.engine_down()
