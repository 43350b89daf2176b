"""A load of mixed lengths on the fake runner, stepped by the real loop."""

from dataclasses import dataclass

import numpy as np

from hillstar.engine.channel import QueueChannel
from hillstar.engine.loop import EngineLoop
from hillstar.engine.messages import EngineStats, SamplingParams, Submit, pack_ids
from support.engine_bench import EngineBench
from support.fake_runner import EOS_ID, FakeModel

VOCAB_SIZE = 30_000


@dataclass(frozen=True, slots=True)
class Arrival:
    prompt: np.ndarray  # int32 [num_prompt_tokens]
    num_output_tokens: int


@dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """A fake model whose outputs end after a given length; a sequence's seed is its index."""

    vocab_size: int = VOCAB_SIZE
    lengths: tuple[int, ...] = ()

    def next_token(self, context: np.ndarray, params: SamplingParams, num_output: int) -> int:
        if num_output + 1 == self.lengths[params.seed]:
            return EOS_ID
        return super().next_token(context, params, num_output)


def mixed_load(num_arrivals: int, max_model_len: int, seed: int) -> list[Arrival]:
    """Log-normal lengths (median 245 tokens, sigma 1) of prompts and of outputs, each cut at half
    of `max_model_len`, which leaves a mean near 370. No two prompts share a prefix."""
    generator = np.random.default_rng(seed)
    half = max_model_len // 2
    lengths = generator.lognormal(mean=5.5, sigma=1.0, size=(num_arrivals, 2))
    lengths = np.clip(lengths, 1, half).astype(int)
    return [
        Arrival(generator.integers(1, VOCAB_SIZE, num_prompt, dtype=np.int32), int(num_output))
        for num_prompt, num_output in lengths
    ]


def run_load(
    arrivals: list[Arrival], *, num_blocks: int, block_size: int, max_model_len: int, max_seqs: int
) -> list[EngineStats]:
    """Serve the arrivals, all there at the beginning; the stats after each step.

    Nobody knows how long an output will be: every sequence may fill the context.
    """
    bench = EngineBench(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_seqs,
        max_batched_tokens=1024,
        max_model_len=max_model_len,
        max_waiting=len(arrivals),
        model=ScriptedModel(lengths=tuple(arrival.num_output_tokens for arrival in arrivals)),
    )
    channel = QueueChannel()
    loop = EngineLoop(
        scheduler=bench.scheduler,
        builder=bench.builder,
        runner=bench.runner,
        inbox=channel,
        outbox=channel,
    )
    for index, arrival in enumerate(arrivals):
        params = SamplingParams(max_tokens=max_model_len, seed=index)
        prompt_ids = pack_ids(arrival.prompt)
        channel.post(Submit(sequence_id=str(index), prompt_ids=prompt_ids, params=params))
    num_expected = sum(arrival.num_output_tokens for arrival in arrivals)
    history = [EngineStats()]
    while history[-1].num_generated_tokens_total < num_expected:
        loop.step()
        while not channel.outputs.empty():
            channel.outputs.get_nowait()
        history.append(bench.scheduler.stats())
    return history
