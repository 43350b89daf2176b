"""How many tokens to draft."""

from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.spec.policy import MAX_DRAFT, Acceptance, DecodeCost, num_worthwhile


def cost(fixed: float, per_token: float) -> DecodeCost:
    """Learnt from steps of 1 to 32 tokens."""
    made = DecodeCost()
    for _ in range(20):
        for num_tokens in (1, 2, 4, 8, 16, 32):
            made.observe(num_tokens, fixed + per_token * num_tokens)
    return made


@given(
    fixed=st.floats(0.01, 1.0),
    per_token=st.floats(0.0001, 0.1),
    rate=st.floats(0.0, 1.0),
    rows=st.integers(1, 32),
)
def test_a_draft_is_as_long_as_adds_tokens_a_second(
    fixed: float, per_token: float, rate: float, rows: int
) -> None:
    """No other length yields more than a few percent more tokens a second."""

    def tokens_a_second(count: int) -> float:
        expected = rows + sum(rate ** (i + 1) for i in range(count))
        return expected / (fixed + per_token * (rows + count))

    found = num_worthwhile(rate, MAX_DRAFT, rows, rows, cost(fixed, per_token))
    best = max(map(tokens_a_second, range(MAX_DRAFT + 1)))
    assert tokens_a_second(found) >= 0.95 * best


def test_nothing_is_drafted_where_a_token_costs_as_much_beside_others() -> None:
    """Steps that take as long a token however many there are leave nothing to gain."""
    assert num_worthwhile(0.9, 8, 4, 4.0, cost(0.0001, 0.1)) == 0


def test_what_is_sure_is_drafted_in_full() -> None:
    """Where a token more costs nearly nothing, drafts are as long as they may be."""
    assert num_worthwhile(0.95, 5, 1, 1.0, cost(1.0, 0.001)) == 5
    assert num_worthwhile(1.0, 99, 1, 1.0, cost(1.0, 0.001)) == MAX_DRAFT


def test_an_engine_that_knows_nothing_tries() -> None:
    """Before the first step a few tokens are drafted."""
    assert 1 <= num_worthwhile(Acceptance().rate, 8, 1, 1.0, DecodeCost()) <= 8


def test_acceptance_follows_what_happens() -> None:
    """It rises while drafts are right, falls while they are wrong, and tokens behind a wrong one
    say nothing."""
    right, wrong, cut = Acceptance(), Acceptance(), Acceptance()
    for _ in range(50):
        right.observe(4, 4)
        wrong.observe(4, 0)
        cut.observe(8, 1)
    assert right.rate > 0.9
    assert wrong.rate < 0.1
    assert 0.4 < cut.rate < 0.6
