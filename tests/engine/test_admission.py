"""What is expected of outputs, and what follows for who may enter."""

import pytest

from hillstar.engine.admission import PRIOR_OUTPUT_TOKENS, OutputLengths
from support.engine_bench import EngineBench, submit
from support.fake_runner import FakeModel


def test_lengths_are_learned_per_tenant() -> None:
    """A tenant's own outputs decide; until there are some, everybody's."""
    lengths = OutputLengths()
    assert lengths.expected("a") == PRIOR_OUTPUT_TOKENS
    for _ in range(200):
        lengths.observe("a", 10)
    assert lengths.expected("a") == pytest.approx(10, abs=0.1)
    assert lengths.expected("b") == pytest.approx(10, abs=0.1)
    for _ in range(200):
        lengths.observe("b", 500)
    assert lengths.expected("b") == pytest.approx(500, abs=1)
    assert lengths.expected("a") == pytest.approx(10, abs=0.1)


def _most_running(bench: EngineBench, num_sequences: int) -> int:
    for number in range(num_sequences):
        message = submit(f"s{number}", [number % 49 + 1, number // 49 + 1, 3], max_tokens=100)
        bench.tell(message)
    most = 0
    while len(bench.finishes) < num_sequences:
        bench.step()
        most = max(most, bench.scheduler.stats().running)
    return most


def test_expected_growth_keeps_sequences_out_that_would_have_to_give_way() -> None:
    """With true expectations the pool is filled, and nobody gives way."""
    bench = EngineBench(num_blocks=53, max_num_seqs=40)
    most = _most_running(bench, 12)
    assert most == 4  # 13 blocks each, one kept free
    assert bench.scheduler.stats().num_preemptions_total == 0


def test_short_outputs_let_more_sequences_run_than_their_limits_would() -> None:
    """Where outputs are far shorter than max_tokens, at least three times as many run at once."""
    bench = EngineBench(num_blocks=53, max_num_seqs=40, model=FakeModel(eos_probability=0.15))
    bench.teach_short_outputs()
    most = _most_running(bench, 60)
    reserved_at_most = 53 // 13
    assert most >= 3 * reserved_at_most
    for name in bench.submits:
        assert bench.tokens[name] == bench.expected(name)


def test_a_sequence_alone_always_enters() -> None:
    """Expectations and watermark do not apply to one that has the pool for itself."""
    bench = EngineBench(num_blocks=4)
    bench.tell(submit("a", [1] * 30, max_tokens=3))
    bench.run()
    assert bench.tokens["a"] == bench.expected("a")
