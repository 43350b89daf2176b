"""What a model says when each sequence runs alone, and how other runs are held against it.

The rule: output is equal token for token in fp32. Only where the two best logits of a greedy
reference lie within `TIE` may rounding decide; such a position and what follows it is not
compared, and counts as excluded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from hillstar.engine.messages import SamplingParams
from support.local_engine import Generation, LoadedModel, LocalEngine

TIE = 1e-4
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A sequence and its reference output."""

    name: str
    tenant: str  # greedy and sampled twins share a prompt, and must not share its blocks
    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    num_comparable: int  # reference tokens before the first tie

    def check(self, token_ids: Sequence[int], first_token: int = 0) -> None:
        """Hold output tokens from index `first_token` on against the reference."""
        assert len(token_ids) == len(self.expected) - first_token, f"{self.name}: wrong length"
        num_compared = max(0, self.num_comparable - first_token)
        found = list(token_ids[:num_compared])
        expected = self.expected[first_token : first_token + num_compared]
        assert found == expected, f"{self.name} differs from its reference"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and what it says, greedily and sampled, to some prompts of mixed lengths.

    The last two prompts share a long prefix that ends inside a block.
    """

    model: LoadedModel
    num_tokens: int  # of each output
    cases: tuple[Case, ...]  # greedy and sampled in turns

    @staticmethod
    def of(model: LoadedModel, prompts: Sequence[list[int]], num_tokens: int) -> "Subject":
        """Make the references: each sequence alone in a fresh engine, its prompt in one step."""
        cases = [
            _reference(model, f"{tenant} {index}", tenant, prompt, params)
            for index, prompt in enumerate(prompts)
            for tenant, params in (
                ("greedy", greedy(num_tokens)),
                ("sampled", sampled(num_tokens, seed=index)),
            )
        ]
        return Subject(model, num_tokens, tuple(cases))

    def engine(self, **changes: object) -> LocalEngine:
        return LocalEngine(self.model, **{"block_size": BLOCK_SIZE, "num_blocks": 160, **changes})

    def submit(self, engine: LocalEngine, case: Case) -> Generation:
        return engine.submit(case.name, case.prompt, case.params, tenant=case.tenant)

    def leave(self, engine: LocalEngine, case: Case, num_tokens: int) -> Generation:
        """Submit the beginning of a case; its blocks are kept when it ends."""
        params = msgspec.structs.replace(case.params, max_tokens=num_tokens)
        name = case.name + " left"
        return engine.submit(name, case.prompt, params, tenant=case.tenant, lease_id=name)

    def check(self, engine: LocalEngine) -> None:
        """Hold every case's output against its reference."""
        for case in self.cases:
            case.check(engine.generations[case.name].token_ids)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens, max_tokens_is_explicit=True, temperature=0, ignore_eos=True
    )


def sampled(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens,
        max_tokens_is_explicit=True,
        temperature=0.8,
        top_p=0.95,
        seed=seed,
        ignore_eos=True,
    )


def _reference(
    model: LoadedModel, name: str, tenant: str, prompt: list[int], params: SamplingParams
) -> Case:
    engine = LocalEngine(model, block_size=BLOCK_SIZE, speculation=False)
    generation = engine.submit(name, prompt, _with_top_two(params))
    engine.run()
    assert engine.stats.num_steps_total == params.max_tokens, "the prompt went in as a whole"
    num_comparable = len(generation.token_ids)
    if params.temperature == 0:
        num_comparable = num_before_tie(generation)
    return Case(name, tenant, prompt, params, generation.token_ids, num_comparable)


def num_before_tie(generation: Generation) -> int:
    """Output tokens before the first whose two best logits (both reported) lie within TIE."""
    for index, position in enumerate(generation.logprobs):
        (_, best), (_, second) = position.top
        if best - second <= TIE:
            return index
    return len(generation.token_ids)


def expect_short_outputs(engine: LocalEngine, tenants: Iterable[str]) -> None:
    """Let every tenant end many short outputs: so more is admitted than will fit."""
    one_token = SamplingParams(max_tokens=1)
    for tenant in tenants:
        for index in range(50):
            engine.submit(f"short {tenant} {index}", [5], one_token, tenant=tenant)
    engine.run()


def _with_top_two(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, top_logprobs=2)
