"""How a sequence is run never changes what it says: greedy or sampled, in fp32 on the CPU.

Every rule is tested on the default model with real text, and on a tiny random model of every
family. `support.equivalence` states what "the same" means.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from hillstar.engine.messages import Park, Unpark, unpack_ids
from hillstar.server.request import parse_create
from hillstar.server.text import Tokenizer
from support.default_model import default_model
from support.equivalence import (
    BLOCK_SIZE,
    Case,
    Subject,
    expect_short_outputs,
    num_before_tie,
)
from support.local_engine import LoadedModel
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny

DEFAULT = "default model"

STORY = """\
High in the Andes, where the air is thin and the nights are cold, a small bird lives on nectar. \
All day it flies from flower to flower, and its heart beats more than a thousand times a minute. \
When the sun goes down there is nothing to drink, and what it has eaten would not last until the \
morning. So it finds a sheltered place under a rock, closes its eyes and lets its body grow as \
cold as the stone around it. Anyone who found it would think that it was dead. But before the \
first light it begins to shiver, and within a few minutes it is as warm as before and gone. """
QUESTIONS = (
    "Write a function in Python that adds up the squares of the first n odd numbers, and say "
    "in one sentence why the result is so simple.",
    f"{STORY}\nIn one sentence: why does the bird grow cold?",
    f"{STORY}\nInvent a name for the bird and go on with the story.",
)


@pytest.fixture(scope="module", params=[pytest.param(DEFAULT, marks=pytest.mark.model), *FAMILIES])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    if request.param == DEFAULT:
        folder = default_model().dir
        prompts, num_tokens = real_prompts(folder), 48
    else:
        folder = tmp_path_factory.mktemp("tiny")
        save_tiny(request.param, folder)
        prompts, num_tokens = random_prompts(), 24
    yield Subject.of(LoadedModel.load(folder), prompts, num_tokens)


def real_prompts(folder: Path) -> list[list[int]]:
    """A few words as they are, then questions in the model's chat template."""
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode("The hummingbird")]
    for question in QUESTIONS:
        create = parse_create({"input": question}, surface="http")
        prompt = tokenizer.build_prompt(None, create, max_model_len=1024)
        prompts.append(unpack_ids(prompt.prompt_ids).tolist())
    return prompts


def random_prompts() -> list[list[int]]:
    """Shorter than a block, whole blocks, and two with 75 common tokens."""
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()

    shared = ids(75)
    return [ids(3), ids(2 * BLOCK_SIZE), ids(61), shared + ids(41), shared + ids(22)]


def common_prefix(a: Case, b: Case) -> int:
    pairs = zip(a.prompt, b.prompt, strict=False)
    return next(index for index, (x, y) in enumerate(pairs) if x != y)


def test_the_reference_is_what_transformers_generates(subject: Subject) -> None:
    """One sequence alone says, greedily, what transformers' `generate` says in fp32."""
    model = AutoModelForCausalLM.from_pretrained(subject.model.dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    case = next(case for case in subject.cases[2:] if case.tenant == "greedy")
    prompt = torch.tensor([case.prompt])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=subject.num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    case.check(output[0, len(case.prompt) :].tolist())


def test_ties_are_rare(subject: Subject) -> None:
    """At most 1 % of the greedy reference tokens are excluded from the comparisons."""
    cases = [case for case in subject.cases if case.tenant == "greedy"]
    num_tokens = sum(len(case.expected) for case in cases)
    num_excluded = num_tokens - sum(case.num_comparable for case in cases)
    assert num_tokens == len(cases) * subject.num_tokens
    assert num_excluded <= 0.01 * num_tokens


def test_a_batch_changes_nothing(subject: Subject) -> None:
    """Sequences of mixed lengths in one batch say what each says alone."""
    engine = subject.engine()
    for case in subject.cases:
        subject.submit(engine, case)
    engine.run(lambda: engine.stats.running == len(subject.cases))
    engine.run()
    subject.check(engine)


def test_drafts_change_nothing(subject: Subject) -> None:
    """What is guessed from the context and checked is what would have been said anyway, greedy or
    sampled, alone and in a batch whose other members are guessed wrongly; and it saves steps."""
    engine = subject.engine()
    for case in subject.cases:
        subject.submit(engine, case)
    engine.run()
    subject.check(engine)
    alone = subject.engine()
    for case in subject.cases:
        subject.submit(alone, case)
        alone.run()
    subject.check(alone)
    assert alone.stats.num_drafted_tokens_total > 0
    num_tokens = alone.stats.num_generated_tokens_total
    assert num_tokens == len(subject.cases) * subject.num_tokens
    assert alone.stats.num_steps_total == num_tokens - alone.stats.num_accepted_tokens_total


def test_the_step_of_admission_changes_nothing(subject: Subject) -> None:
    """Sequences that enter while others decode, or wait for a row, say what each says alone."""
    engine = subject.engine(max_num_seqs=4)
    for case in subject.cases:
        subject.submit(engine, case)
        for _ in range(3):
            engine.step()
    assert engine.stats.running == 4
    assert engine.stats.waiting > 0
    engine.run()
    subject.check(engine)


def test_chunks_change_nothing(subject: Subject) -> None:
    """Prompts fed in chunks of all sizes up to 27, as decoding rows leave room, are understood
    as whole ones."""
    engine = subject.engine(max_batched_tokens=27, max_num_seqs=5, speculation=False)
    num_prompt_tokens = sum(len(case.prompt) for case in subject.cases)
    for case in subject.cases:
        subject.submit(engine, case)
    engine.run()
    assert engine.stats.num_steps_total > subject.num_tokens + num_prompt_tokens // 27 // 2
    subject.check(engine)


def test_shared_prefixes_change_nothing(subject: Subject) -> None:
    """A prefix that ends inside a block is shared by copying that block; neither side notices."""
    engine = subject.engine()
    *_, (first, first_twin), (second, second_twin) = zip(
        subject.cases[::2], subject.cases[1::2], strict=True
    )
    shared = common_prefix(first, second)
    assert shared > 4 * BLOCK_SIZE and shared % BLOCK_SIZE
    for case in (first, first_twin):
        subject.leave(engine, case, num_tokens=8)
    engine.run()
    num_cached = {first: len(first.prompt) - 1, second: shared}
    num_cached |= {first_twin: len(first.prompt) - 1, second_twin: shared}
    for case in num_cached:
        subject.submit(engine, case)
    engine.run()
    for case, num_expected in num_cached.items():
        assert engine.generations[case.name].num_cached == num_expected
        case.check(engine.generations[case.name].token_ids)


def test_preemption_changes_nothing(subject: Subject) -> None:
    """Sequences that give way for lack of blocks, and are computed again, say the same."""
    full_blocks = {
        (case.tenant, *case.prompt[:end])
        for case in subject.cases
        for end in range(BLOCK_SIZE, len(case.prompt) + 1, BLOCK_SIZE)
    }
    # Every prompt fits, with less than two blocks more for each; all outputs do not.
    num_blocks = len(full_blocks) + 2 * len(subject.cases)
    engine = subject.engine(num_blocks=num_blocks, speculation=False)
    expect_short_outputs(engine, {case.tenant for case in subject.cases})
    for case in subject.cases:
        subject.submit(engine, case)
    engine.run()
    assert engine.stats.num_preemptions_total > 0
    subject.check(engine)


def test_a_fork_goes_on_as_its_parent_did(subject: Subject) -> None:
    """A sequence that starts from an earlier point of another one says the same from there."""
    engine = subject.engine()
    for case in subject.cases:
        subject.leave(engine, case, num_tokens=20)
    engine.run()
    points = dict(zip(subject.cases, itertools.cycle((1, 5, 19)), strict=False))
    for case, num_kept in points.items():
        prompt = case.prompt + case.expected[:num_kept]
        params = msgspec.structs.replace(case.params, max_tokens=subject.num_tokens - num_kept)
        engine.submit(f"{case.name} fork", prompt, params, tenant=case.tenant)
    engine.run()
    for case, num_kept in points.items():
        fork = engine.generations[f"{case.name} fork"]
        assert fork.num_cached == len(case.prompt) + num_kept - 1
        case.check(fork.token_ids, num_kept)


def test_forks_of_one_sequence_do_not_meet(subject: Subject) -> None:
    """Branches that leave one sequence at one point, all at once, each say what they say alone."""
    parent = subject.cases[2]
    branches = [parent.prompt + parent.expected[:21] + [5 + index, 9] for index in range(3)]
    params = msgspec.structs.replace(parent.params, max_tokens=12, top_logprobs=2)
    alone = [subject.engine().generate([branch], [params])[0] for branch in branches]
    engine = subject.engine()
    beginning = msgspec.structs.replace(parent.params, max_tokens=22)
    engine.submit("parent", parent.prompt, beginning, lease_id="parent")
    engine.run()
    together = engine.generate(branches, [params] * len(branches))
    for one, other in zip(alone, together, strict=True):
        assert other.num_cached == len(parent.prompt) + 21
        num_compared = num_before_tie(one)
        assert one.token_ids[:num_compared] == other.token_ids[:num_compared]


def test_a_fresh_engine_goes_on_from_tokens(subject: Subject) -> None:
    """A sequence submitted again with what it has said goes on as if nothing had happened."""
    engine = subject.engine()
    points = dict(
        zip(subject.cases, itertools.cycle((1, 16, subject.num_tokens - 1)), strict=False)
    )
    for case, num_said in points.items():
        said = case.expected[:num_said]
        engine.submit(case.name, case.prompt, case.params, output=said, tenant=case.tenant)
    engine.run()
    for case, num_said in points.items():
        case.check(engine.generations[case.name].token_ids, num_said)


def test_parking_changes_nothing(subject: Subject) -> None:
    """A sequence that leaves the batch for a while goes on at its next token."""
    engine = subject.engine()
    for case in subject.cases:
        subject.submit(engine, case)
    parked, *others = subject.cases
    for _ in range(9):
        engine.step()
    engine.tell(Park(parked.name))
    num_said = len(engine.generations[parked.name].token_ids)
    engine.run(lambda: len(engine.generations[others[0].name].token_ids) > num_said + 5)
    assert engine.stats.parked == 1
    assert len(engine.generations[parked.name].token_ids) <= num_said + 2
    engine.tell(Unpark(parked.name))
    engine.run()
    subject.check(engine)
