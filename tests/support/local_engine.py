"""A whole engine on real weights, stepped by hand in the test's thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hillstar.engine.assembly import assemble
from hillstar.engine.channel import QueueChannel
from hillstar.engine.config import EngineConfig
from hillstar.engine.messages import (
    EngineStats,
    Finish,
    Frame,
    Output,
    SamplingParams,
    Submit,
    ToEngine,
    TokenLogprobs,
    pack_ids,
)
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import load_weights
from hillstar.engine.models.weights import Weights

MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in fp32 on the CPU; engines share its weights."""

    dir: Path
    config: ModelConfig
    weights: Weights

    @staticmethod
    def load(model_dir: Path) -> "LoadedModel":
        config = ModelConfig.from_dir(model_dir)
        return LoadedModel(model_dir, config, load_weights(model_dir, config, dtype=torch.float32))


@dataclass(slots=True)
class Generation:
    """What came out for one sequence; with `output_ids` in its Submit, what came after them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def num_cached(self) -> int:
        """Prompt tokens whose KV was found."""
        assert self.finish is not None, "it has not finished"
        return self.finish.usage.num_cached_tokens


class LocalEngine:
    """The engine's loop over queues. Every invariant is checked after every step."""

    def __init__(self, model: LoadedModel, **changes: object) -> None:
        """changes: fields of EngineConfig."""
        values: dict[str, object] = {
            "model_dir": model.dir,
            "model_name": "local",
            "dtype": "float32",
            "num_blocks": 256,
            "max_model_len": 4096,
            "max_batched_tokens": 4096,
            **changes,
        }
        self.config = EngineConfig(**values)  # type: ignore[arg-type]
        self.generations: dict[str, Generation] = {}
        self._channel = _Channel()
        self._engine = assemble(
            self.config, model.config, model.weights, inbox=self._channel, outbox=self._channel
        )

    @property
    def stats(self) -> EngineStats:
        return self._engine.scheduler.stats()

    def submit(
        self,
        sequence_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        output: Sequence[int] = (),
        tenant: str = "local",
        lease_id: str | None = None,
    ) -> Generation:
        """Hand a sequence in; what it says is added to the result as the engine is stepped."""
        message = Submit(
            sequence_id=sequence_id,
            prompt_ids=pack_ids(prompt),
            output_ids=pack_ids(output),
            params=params,
            tenant=tenant,
            salt=tenant.encode(),
            lease_id=lease_id,
        )
        self._channel.post(message)
        return self.generations.setdefault(sequence_id, Generation())

    def tell(self, message: ToEngine) -> None:
        self._channel.post(message)

    def step(self) -> None:
        self._engine.loop.step()
        self._engine.scheduler.check()
        while not self._channel.outputs.empty():
            frame = self._channel.outputs.get_nowait()
            assert isinstance(frame, Frame)
            for output in frame.outputs:
                self._take(output)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until the condition holds; without one, until all that was submitted has ended."""
        is_over = until or self._have_all_ended
        for _ in range(MAX_STEPS):
            if is_over():
                return
            self.step()
        raise AssertionError(f"not over after {MAX_STEPS} steps")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Generation]:
        """Run sequences together to their ends."""
        base = len(self.generations)
        generations = [
            self.submit(f"sequence-{base + i}", prompt, params_of)
            for i, (prompt, params_of) in enumerate(zip(prompts, params, strict=True))
        ]
        self.run()
        return generations

    def _have_all_ended(self) -> bool:
        return all(generation.finish for generation in self.generations.values())

    def _take(self, output: Output) -> None:
        generation = self.generations[output.sequence_id]
        assert generation.finish is None, "output after the finish"
        generation.token_ids += output.token_ids
        generation.logprobs += output.logprobs or []
        generation.finish = output.finish


class _Channel(QueueChannel):
    """Waiting would be for ever: nobody else can say anything."""

    def wait_readable(self, timeout_s: float | None) -> bool:
        assert super().wait_readable(0), "the engine waits for a message"
        return True
