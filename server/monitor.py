"""What is known of the engine: its state, its last words, its counters."""

import msgspec

from hillstar.engine.messages import EngineStats, Frame, Ready
from hillstar.server.engineport import EngineEnd
from hillstar.server.history import Historian
from hillstar.server.ports import EngineState, Observer
from hillstar.server.sequences import SequenceTable

TOTALS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))

MAX_FAILED_STARTS = 5  # engines in succession that died while they loaded


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
        self.num_restarts = 0
        self._num_failed_starts = 0  # in succession
        self._last = EngineStats()  # of the engine that is up
        self._before = dict.fromkeys(TOTALS, 0)  # what the dead ones had reached

    @property
    def stats(self) -> EngineStats:
        """The gauges of the engine that is up; the totals of all engines so far."""
        return msgspec.structs.replace(self._last, **self._totals())

    def engine_loading(self, done: int, total: int) -> None:
        self.state = "starting"
        self.loading = (done, total)

    def engine_up(self, ready: Ready) -> None:
        self.state = "ready"
        self.ready = ready
        self._num_failed_starts = 0
        self._last = EngineStats(blocks_free=ready.num_blocks)  # until its first frame
        self.error = None
        self._historian.limit_context(ready.max_model_len)
        self._sequences.engine_up()

    def engine_frame(self, frame: Frame) -> None:
        self._last = frame.stats
        for seconds in frame.stats.step_seconds:
            self._observer.step(seconds)
        self._sequences.frame(frame)

    def engine_down(self, reason: str, end: EngineEnd) -> None:
        self._num_failed_starts += end != "died"
        is_hopeless = end == "refused" or self._num_failed_starts >= MAX_FAILED_STARTS
        self.state = "failed" if is_hopeless else "down"
        self.error = reason
        self._before = self._totals()
        self._last = EngineStats()
        self.num_restarts += end == "died"
        self._sequences.engine_down()

    def _totals(self) -> dict[str, int]:
        return {name: getattr(self._last, name) + self._before[name] for name in TOTALS}
