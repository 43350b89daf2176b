"""KV memory holds tokens, not reservations: both promises measured on one load.

The load is `support.mixed_load`: log-normal prompts and outputs, a mean near 370 tokens each, in
a context of 4096; all are there from the beginning, and nobody knows how long outputs will be.
The pool is 1,024 blocks of 16 tokens.
"""

import statistics

import pytest

from hillstar.engine.messages import EngineStats
from support.mixed_load import Arrival, mixed_load, run_load

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
NUM_BLOCKS = 1024


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return mixed_load(160, MAX_MODEL_LEN, seed=1)


@pytest.fixture(scope="module")
def history(arrivals: list[Arrival]) -> list[EngineStats]:
    """The load served with as many rows as anybody could want: memory is the limit."""
    return serve(arrivals, max_seqs=256)


def serve(arrivals: list[Arrival], max_seqs: int) -> list[EngineStats]:
    """The stats after each step in which somebody waited: the batch was full."""
    history = run_load(
        arrivals,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_seqs=max_seqs,
    )
    full = [stats for stats in history if stats.waiting and stats.running]
    assert len(full) > len(history) // 4
    return full


def test_the_load_is_as_mixed_as_it_says(arrivals: list[Arrival]) -> None:
    """Prompts and outputs have a mean of 370 tokens within a quarter, and vary as widely."""
    for lengths in (
        [len(arrival.prompt) for arrival in arrivals],
        [arrival.num_output_tokens for arrival in arrivals],
    ):
        assert statistics.mean(lengths) == pytest.approx(370, rel=0.25)
        assert statistics.pstdev(lengths) > 250


def test_less_than_four_percent_of_kv_memory_is_wasted(history: list[EngineStats]) -> None:
    """1 - kv_tokens_used / kv_tokens_capacity is under 4 % on average over full batches."""
    waste = [1 - stats.kv_tokens_used / stats.kv_tokens_capacity for stats in history]
    assert statistics.mean(waste) < 0.04


def test_three_times_as_many_run_at_once_as_with_reservations(
    arrivals: list[Arrival], history: list[EngineStats]
) -> None:
    """The same memory holds 3 times the sequences that it does with each one's maximum reserved.

    Reserving is simulated by the same engine on the same arrivals, with only as many rows as
    contexts fit into the pool whole.
    """
    num_contexts = NUM_BLOCKS * BLOCK_SIZE // MAX_MODEL_LEN
    reserved = serve(arrivals, max_seqs=num_contexts)
    num_running = statistics.mean(stats.running for stats in history)
    num_reserved = statistics.mean(stats.running for stats in reserved)
    assert max(stats.running for stats in reserved) == num_contexts
    assert num_running >= 3 * num_reserved
    assert history[-1].num_preemptions_total == 0, "not by computing things again and again"
