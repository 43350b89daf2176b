"""What the Hub counts when somebody asks: nothing is kept for it while nobody does."""

from collections import Counter

from hillstar.server.actors import ActorTable
from hillstar.server.journal import Journal
from hillstar.server.monitor import EngineMonitor
from hillstar.server.ports import HubStats


def take_census(
    monitor: EngineMonitor, actors: ActorTable, journal: Journal, *, is_draining: bool
) -> HubStats:
    """Everything for /metrics and the health endpoints, as of now."""
    sessions: Counter[str] = Counter()
    responses: Counter[str] = Counter()
    num_durable = 0
    for actor in actors:
        num_durable += actor.is_durable
        session = actor.session
        sessions["parked" if session is not None and session.is_parked else "awake"] += 1
        if session is not None:
            responses.update(turn.state for turn in session.turns)
    sessions["hibernated"] = max(0, actors.num_stored - num_durable)
    return HubStats(
        engine_state=monitor.state,
        loading=monitor.loading,
        ready=monitor.ready,
        engine=monitor.stats,
        engine_error=monitor.error,
        num_engine_restarts=monitor.num_restarts,
        num_sessions=sessions,
        num_responses=responses,
        num_actor_restarts=actors.num_crashes,
        num_journal_commits=journal.num_commits,
        num_journal_tokens=journal.num_tokens,
        storage_available=journal.available,
        draining=is_draining,
    )
