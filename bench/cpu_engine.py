"""The engine on a CPU beside transformers' `generate`, on the default model, in one run.

    python bench/cpu_engine.py [--out bench/results/cpu-engine.json]

Three workloads, bf16, greedy, random prompts (new ones each time: nothing is found in the prefix
cache), each engine given the same prompts in turn, medians of the repeats. Ours twice: as it is
served, and with `--no-speculation` (plain). Random prompts lead the model into repetition, which
drafts guess well; text8 begins eight answers with passages of the project's own pages instead.
* b1: one request, 128 tokens in, 128 out; b8: eight of them at once. Output tokens a second, the
  prefill included.
* prefill: one request of 1,024 tokens in, 1 out. Prompt tokens a second.

The engine is the whole of it but the process boundary: messages, scheduler, batches, runner.
Floor of a decode step: every weight is read once. The result is void unless the checks hold:
* fp32: token for token transformers' greedy output (a position whose two best logits lie within
  1e-4 ends the comparison of that prompt and is counted);
* bf16: forced along our own tokens, each one's fp32 logit in transformers is within 2 epsilon of
  the best, epsilon being the largest error of transformers' own bf16 logits.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from common import finish, median_s, report
from hillstar.cli.values import default_data_dir
from hillstar.engine.assembly import Engine, assemble
from hillstar.engine.channel import QueueChannel
from hillstar.engine.config import DTypeName, EngineConfig
from hillstar.engine.messages import Frame, SamplingParams, Submit, pack_ids
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.fetch import resolve_model
from hillstar.engine.models.load import load_weights
from hillstar.server.text import Tokenizer

SEED = 20261129
NUM_IN, NUM_OUT, NUM_PREFILL = 128, 128, 1024
GAP = 1e-4  # two best logits closer than this may change places in fp32


class Ours:
    """An engine and the queues to it, stepped by the benchmark."""

    def __init__(self, folder: Path, dtype: DTypeName, *, speculation: bool = True) -> None:
        config = EngineConfig(
            model_dir=folder,
            model_name="bench",
            dtype=dtype,
            num_blocks=512,
            max_num_seqs=8,
            speculation=speculation,
        )
        model = ModelConfig.from_dir(folder)
        weights = load_weights(folder, model, dtype=getattr(torch, dtype))
        self._channel = QueueChannel()
        self._engine: Engine = assemble(
            config, model, weights, inbox=self._channel, outbox=self._channel
        )
        self._num_submitted = 0

    def generate(self, prompts: np.ndarray, num_tokens: int) -> np.ndarray:
        """Greedy tokens `[batch, num_tokens]` after prompts `[batch, length]`."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        for prompt in prompts:
            self._num_submitted += 1
            sequence_id = str(self._num_submitted)
            tokens[sequence_id] = []
            self._channel.post(
                Submit(sequence_id=sequence_id, prompt_ids=pack_ids(prompt), params=params)
            )
        num_running = len(prompts)
        while num_running:
            self._engine.loop.step()
            while not self._channel.outputs.empty():
                message = self._channel.outputs.get()
                assert isinstance(message, Frame)
                for output in message.outputs:
                    tokens[output.sequence_id] += output.token_ids
                    if output.finish is not None:
                        assert output.finish.reason == "length", output.finish
                        num_running -= 1
        return np.array(list(tokens.values()))


class Theirs:
    """transformers' model and its `generate`."""

    def __init__(self, folder: Path, dtype: DTypeName) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model: PreTrainedModel = loaded.eval()
        assert self._model.generation_config is not None
        self._model.generation_config.eos_token_id = None  # go on after a turn's end, as we do

    def generate(self, prompts: np.ndarray, num_tokens: int) -> np.ndarray:
        """Greedy tokens `[batch, num_tokens]` after prompts `[batch, length]`."""
        token_ids = torch.from_numpy(prompts).long()
        generate: Any = self._model.generate  # its type says neither this call nor its result
        output = generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            pad_token_id=0,
            do_sample=False,
        )
        new: np.ndarray = output[:, prompts.shape[1] :].numpy()
        return new

    @torch.inference_mode()
    def logits(self, prompts: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
        """What each of `tokens` was chosen from: float32 `[batch, num_tokens, vocab]`."""
        given = torch.from_numpy(np.concatenate((prompts, tokens[:, :-1]), axis=1)).long()
        logits: torch.Tensor = self._model(given, logits_to_keep=tokens.shape[1]).logits
        return logits.float()


def random_prompts(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    return rng.integers(1000, 40000, (batch, length)).astype(np.int32)


def check(folder: Path, theirs_bf16: Theirs, ours_bf16: Ours) -> dict[str, Any]:
    """Both rules of the module's docstring. Raises AssertionError when one does not hold."""
    rng = np.random.default_rng(SEED + 1)
    prompts = random_prompts(rng, 4, 50)
    theirs = Theirs(folder, "float32")
    expected = theirs.generate(prompts, 32)
    tokens = Ours(folder, "float32").generate(prompts, 32)
    gaps = theirs.logits(prompts, expected).topk(2).values.diff(dim=-1)[..., 0].neg()
    num_compared = num_excluded = 0
    for row in range(len(prompts)):
        different = np.flatnonzero(tokens[row] != expected[row])
        end = int(different[0]) if len(different) else tokens.shape[1]
        num_compared += end
        if len(different):
            assert gaps[row, end] < GAP, f"prompt {row}: another token at {end}"
            num_excluded += 1

    chosen = ours_bf16.generate(prompts, 32)
    exact = theirs.logits(prompts, chosen)
    epsilon = float((theirs_bf16.logits(prompts, chosen) - exact).abs().max())
    index = torch.from_numpy(chosen).long()[..., None]
    worst = float((exact.amax(-1) - exact.gather(-1, index)[..., 0]).max())
    assert worst <= 2 * epsilon, f"bf16: {worst} below the best logit, epsilon is {epsilon}"
    return {
        "fp32_tokens_equal": num_compared,
        "fp32_near_ties_excluded": num_excluded,
        "bf16_worst_below_best": round(worst, 4),
        "bf16_epsilon": round(epsilon, 4),
    }


def ceilings() -> dict[str, float]:
    """GB/s: reading memory, and torch's products of one token with weights it has not cached."""
    large = torch.ones(1 << 27)
    found = {"memory_read_GBps": large.nbytes / median_s(large.sum) / 1e9}
    for name, shape in (("gate_up", (64, 3072, 576)), ("lm_head", (4, 49152, 576))):
        weights = torch.randn(shape, dtype=torch.bfloat16)
        x = torch.randn(1, shape[-1], dtype=torch.bfloat16)

        def linear(weights: torch.Tensor = weights, x: torch.Tensor = x) -> None:
            for weight in weights:
                F.linear(x, weight)

        def mv(weights: torch.Tensor = weights, x: torch.Tensor = x[0]) -> None:
            for weight in weights:
                torch.mv(weight, x)

        found[f"linear_{name}_GBps"] = weights.nbytes / median_s(linear) / 1e9
        found[f"mv_{name}_GBps"] = weights.nbytes / median_s(mv) / 1e9
    return {name: round(value, 1) for name, value in found.items()}


def passages(folder: Path, batch: int, length: int, skip: int) -> np.ndarray:
    """Passages of the project's own pages, behind the first `skip` tokens: int32
    `[batch, length]`."""
    tokenizer = Tokenizer(folder)
    pages = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    ids = [tokenizer.encode(page.read_text()) for page in pages]
    long = [page[skip : skip + length] for page in ids if len(page) >= skip + length]
    return np.array(long[:batch], dtype=np.int32)


def measure(engines: dict[str, Ours | Theirs], folder: Path, repeats: int) -> dict[str, Any]:
    """The workloads, all engines in turn. engines: by the prefix of their figures."""
    figures: dict[str, Any] = {}
    for name, batch, num_in, num_out in (
        ("b1", 1, NUM_IN, NUM_OUT),
        ("b8", 8, NUM_IN, NUM_OUT),
        ("text8", 8, NUM_IN, NUM_OUT),
        ("prefill", 1, NUM_PREFILL, 1),
    ):
        rng = np.random.default_rng(SEED)
        counted = batch * (num_out if num_out > 1 else num_in)
        rates: dict[str, list[float]] = {prefix: [] for prefix in engines}
        for repeat in range(repeats + 1):
            if name == "text8":
                prompts = passages(folder, batch, num_in, skip=17 * repeat)
            else:
                prompts = random_prompts(rng, batch, num_in)
            for prefix, engine in engines.items():
                start = time.perf_counter()
                engine.generate(prompts, num_out)
                if repeat:  # the first warms up
                    rates[prefix].append(counted / (time.perf_counter() - start))
        for prefix, values in rates.items():
            figures[f"{prefix}{name}_tok_s"] = round(statistics.median(values), 1)
        for prefix in ("", "plain_"):
            ratios = [a / b for a, b in zip(rates[prefix], rates["peer_"], strict=True)]
            figures[f"{prefix}{name}_ratio"] = round(statistics.median(ratios), 2)
        print(
            f"{name:8} {figures[f'{name}_tok_s']:8.1f} tok/s,"
            f" plain {figures[f'plain_{name}_tok_s']:8.1f},"
            f" transformers {figures[f'peer_{name}_tok_s']:8.1f},"
            f" ratio {figures[f'{name}_ratio']} (plain {figures[f'plain_{name}_ratio']})",
            flush=True,
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    folder = resolve_model(None, default_data_dir() / "models").dir
    limits = ceilings()
    print("ceilings", limits)
    ours, theirs = Ours(folder, "bfloat16"), Theirs(folder, "bfloat16")
    checked = check(folder, theirs, ours)
    print("checked", checked)
    plain = Ours(folder, "bfloat16", speculation=False)
    engines: dict[str, Ours | Theirs] = {"": ours, "plain_": plain, "peer_": theirs}
    figures = measure(engines, folder, options.repeats)
    result = report(
        SEED,
        threads=torch.get_num_threads(),
        model=folder.name,
        ceilings=limits,
        checked=checked,
        **figures,
    )
    finish(result, options.out)


if __name__ == "__main__":
    main()
