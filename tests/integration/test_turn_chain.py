"""Turns that continue each other, and samples that share a prompt: nothing is computed twice.

On the default model with its real tokenizer and chat template, in fp32 on the CPU.
"""

import itertools
from dataclasses import dataclass

import pytest

from hillstar.engine.messages import SamplingParams, pack_ids, unpack_ids
from hillstar.server.request import CreateResponse, parse_create
from hillstar.server.text import ParentContext, PastTurn, Prompt, Tokenizer
from support.default_model import default_model
from support.equivalence import num_before_tie
from support.local_engine import Generation, LoadedModel, LocalEngine

pytestmark = pytest.mark.model

MAX_MODEL_LEN = 4096
LEASE = "conversation"
OPENING = "Tell me about an unusual bird with an invented name."
# What is asked next, and how many tokens the answer may have: the first is cut, the second ends.
FOLLOW_UPS = (
    ("Where does it sleep?", 24),
    ("What is the capital of France?", 64),
    ("And Peru?", 8),
)


@dataclass(frozen=True, slots=True)
class Turn:
    request: CreateResponse
    prompt: Prompt
    params: SamplingParams
    answer: Generation
    num_prefilled: int  # by the engine's counter

    @property
    def prompt_ids(self) -> list[int]:
        return ids_of(self.prompt)

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.answer.token_ids


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.load(default_model().dir)


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> Tokenizer:
    return Tokenizer(model.dir)


@pytest.fixture(scope="module")
def turns(model: LoadedModel, tokenizer: Tokenizer) -> list[Turn]:
    """A conversation on one engine, whose first answer does not re-encode to its own ids."""
    engine = LocalEngine(model)
    turns: list[Turn] = []
    seed = seed_of_odd_answer(model, tokenizer)
    take_turn(engine, tokenizer, turns, OPENING, sampled(seed))
    for question, max_tokens in FOLLOW_UPS:
        take_turn(engine, tokenizer, turns, question, greedy(max_tokens))
    return turns


def ids_of(prompt: Prompt) -> list[int]:
    return list(map(int, unpack_ids(prompt.prompt_ids)))


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=32, temperature=1.0, seed=seed)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, top_logprobs=2)


def ask(text: str) -> CreateResponse:
    return parse_create({"input": text}, surface="http")


def seed_of_odd_answer(model: LoadedModel, tokenizer: Tokenizer) -> int:
    """The first seed whose answer to the opening is other ids when its text is encoded."""
    prompt = tokenizer.build_prompt(None, ask(OPENING), max_model_len=MAX_MODEL_LEN)
    ids = ids_of(prompt)
    answers = LocalEngine(model).generate([ids] * 16, [sampled(seed) for seed in range(16)])
    return next(seed for seed, answer in enumerate(answers) if is_odd(tokenizer, answer))


def is_odd(tokenizer: Tokenizer, answer: Generation) -> bool:
    """Whether an answer that was cut does not re-encode to its own ids."""
    assert answer.finish is not None
    text = tokenizer.decode(answer.token_ids)
    return answer.finish.reason == "length" and tokenizer.encode(text) != answer.token_ids


def take_turn(
    engine: LocalEngine,
    tokenizer: Tokenizer,
    turns: list[Turn],
    question: str,
    params: SamplingParams,
) -> None:
    request = ask(question)
    prompt = tokenizer.build_prompt(parent_of(turns), request, max_model_len=MAX_MODEL_LEN)
    ids = ids_of(prompt)
    num_before = engine.stats.num_prefill_tokens_total
    answer = engine.submit(f"turn {len(turns)}", ids, params, lease_id=LEASE)
    engine.run()
    num_prefilled = engine.stats.num_prefill_tokens_total - num_before
    turns.append(Turn(request, prompt, params, answer, num_prefilled))


def parent_of(turns: list[Turn]) -> ParentContext | None:
    if not turns:
        return None
    return ParentContext(
        turns=tuple(PastTurn(t.request.input, pack_ids(t.answer.token_ids)) for t in turns),
        instructions=None,
        prompt_ids=turns[-1].prompt.prompt_ids,
    )


def test_the_chain_has_every_kind_of_answer(turns: list[Turn], tokenizer: Tokenizer) -> None:
    """The chain under test goes on after an odd answer, after a cut one, and after an end."""
    assert is_odd(tokenizer, turns[0].answer)
    reasons = [turn.answer.finish.reason for turn in turns if turn.answer.finish]
    assert reasons == ["length", "length", "stop", "length"]


def test_a_turn_continues_the_ids_of_the_turn_before(turns: list[Turn]) -> None:
    """A prompt begins with its parent's prompt and answer, id by id, odd answers included."""
    for parent, turn in itertools.pairwise(turns):
        assert turn.prompt_ids[: len(parent.all_ids)] == parent.all_ids
        assert turn.prompt.num_inherited == len(parent.all_ids)


def test_a_turn_prefills_only_what_is_new(turns: list[Turn]) -> None:
    """A turn computes its new ids and its parent's last token, which was never fed: no others."""
    assert turns[0].num_prefilled == turns[0].prompt.num_tokens
    for parent, turn in itertools.pairwise(turns):
        num_cached = len(parent.all_ids) - 1
        assert turn.answer.num_cached == num_cached
        assert turn.num_prefilled == turn.prompt.num_tokens - num_cached


def test_a_turn_says_what_its_whole_ids_say_to_a_fresh_engine(
    turns: list[Turn], model: LoadedModel
) -> None:
    """Each answer equals the answer of an engine that has seen nothing of the conversation."""
    for turn in turns:
        [fresh] = LocalEngine(model).generate([turn.prompt_ids], [turn.params])
        assert fresh.num_cached == 0
        num_compared = len(fresh.token_ids)
        if turn.params.temperature == 0:
            num_compared = num_before_tie(fresh)
        assert turn.answer.token_ids[:num_compared] == fresh.token_ids[:num_compared]


def test_parallel_samples_prefill_their_prompt_once(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    """n samples of a prompt compute it once, share its full blocks, and differ by their seeds."""
    num_samples, num_tokens = 8, 24
    prompt = tokenizer.build_prompt(None, ask(OPENING), max_model_len=MAX_MODEL_LEN)
    ids = ids_of(prompt)
    engine = LocalEngine(model)
    samples = [
        engine.submit(str(seed), ids, SamplingParams(max_tokens=num_tokens, seed=seed))
        for seed in range(num_samples)
    ]
    engine.run(lambda: engine.stats.running == num_samples)
    block_size = engine.config.block_size
    num_shared = len(ids) // block_size
    assert num_shared > 1 and len(ids) % block_size
    assert engine.stats.blocks_leased == num_shared + num_samples
    engine.run()
    # Each computes the prompt's last token itself: its logits are what it samples from.
    assert [sample.num_cached for sample in samples] == [0] + [len(ids) - 1] * (num_samples - 1)
    assert engine.stats.num_prefill_tokens_total == len(ids) + num_samples - 1
    assert len({tuple(sample.token_ids) for sample in samples}) == num_samples


def test_a_long_prefix_of_fifty_sequences_is_prefilled_once(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    """50 questions over one 2,000-token text compute the text once, though fed in chunks."""
    num_questions = 50
    text = " ".join(f"Bird {number} sleeps under rock {number * 7 % 97}." for number in range(400))
    prefix = tokenizer.encode(text)[:2000]
    ends = tokenizer.encode("?")
    questions = [[*prefix, 1000 + index, *ends] for index in range(num_questions)]
    engine = LocalEngine(model, num_blocks=400, max_batched_tokens=512)
    params = SamplingParams(max_tokens=2, max_tokens_is_explicit=True, temperature=0)
    answers = engine.generate(questions, [params] * num_questions)
    assert len(prefix) == 2000
    num_new = num_questions * (1 + len(ends))
    assert engine.stats.num_prefill_tokens_total == len(prefix) + num_new
    assert sorted(answer.num_cached for answer in answers) == [0] + [2000] * (num_questions - 1)
