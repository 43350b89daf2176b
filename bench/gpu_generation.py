"""Generations with the Llama-3-8B shape on a GPU, checked against transformers.

Random weights are made on the device by transformers, saved, and loaded by the engine's own
loader. The engine generates greedily in bf16 for 64 mixed sequences (prompts of different lengths,
chunked prefill, decode rows beside prefill chunks), once with its CUDA graphs and once launch by
launch. Then the rule of DESIGN.md, rule 6: forced along our own tokens, each chosen token's fp32
reference logit lies within 2 epsilon of the maximum, epsilon being the largest error of the bf16
reference itself.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaForCausalLM

from common import finish, report
from gpu_driver import Driver, config_8b
from hillstar.engine import cuda_forward
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import load_weights
from shape_8b import VOCAB

LENGTHS = (1, 15, 16, 17, 128, 500, 1031, 2048)  # and others at random
MOST_RANDOM = 600
NUM_PROMPTS = 64


def make_model(folder: Path, num_layers: int, seed: int) -> None:
    """Write a random bf16 model of the 8B shape (vocabulary and widths; depth as asked)."""
    torch.manual_seed(seed)
    config = config_8b(num_hidden_layers=num_layers, max_position_embeddings=8192)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def generate(
    folder: Path, prompts: list[np.ndarray], num_tokens: int, *, with_graphs: bool
) -> list[list[int]]:
    """Greedy tokens of the engine for all prompts at once, in chunks of 512 tokens a step."""
    shapes = cuda_forward.choose_shapes if with_graphs else lambda *_, **__: ()
    model = ModelConfig.from_dir(folder)
    weights = load_weights(folder, model, dtype=torch.bfloat16, device="cuda")
    with mock.patch.object(cuda_forward, "choose_shapes", shapes):
        driver = Driver(
            model, weights, num_blocks=2048, max_batched_tokens=512, max_num_seqs=NUM_PROMPTS
        )
    return driver.run(prompts, num_tokens).tokens


def check(
    reference: LlamaForCausalLM, prompts: list[np.ndarray], tokens: list[list[int]]
) -> dict[str, Any]:
    """The stated rule over every generated position; also how many equal bf16 greedy outright.

    `reference` is bf16 and on the device; it is turned into fp32.
    """
    gaps, epsilon, equal, total = [], 0.0, 0, 0
    rows_bf16 = [_forced_logits(reference, p, t) for p, t in zip(prompts, tokens, strict=True)]
    reference = reference.float()
    for prompt, output, bf16 in zip(prompts, tokens, rows_bf16, strict=True):
        fp32 = _forced_logits(reference, prompt, output)
        epsilon = max(epsilon, float((fp32 - bf16).abs().max()))
        chosen = fp32[torch.arange(len(output)), torch.tensor(output)]
        gaps.append(float((fp32.max(dim=-1).values - chosen).max()))
        equal += int((bf16.argmax(dim=-1) == torch.tensor(output)).sum())
        total += len(output)
    return {
        "epsilon": epsilon,
        "largest_gap": max(gaps),
        "within_2_epsilon": max(gaps) <= 2 * epsilon,
        "equal_to_bf16_greedy": equal,
        "positions": total,
    }


@torch.inference_mode()
def _forced_logits(model: LlamaForCausalLM, prompt: np.ndarray, output: list[int]) -> torch.Tensor:
    """fp32 logits [len(output), vocab] on the host, of the positions that chose `output`."""
    ids = torch.tensor([*prompt.tolist(), *output[:-1]], device="cuda")[None]
    logits = model(ids, logits_to_keep=len(output)).logits[0]
    return logits.float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    others = rng.integers(1, MOST_RANDOM, size=NUM_PROMPTS - len(LENGTHS)).tolist()
    lengths = rng.permutation([*LENGTHS, *others]).tolist()
    prompts = [rng.integers(0, VOCAB, size=n).astype(np.int32) for n in lengths]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, args.layers, args.seed)
        torch.cuda.empty_cache()
        seconds: dict[str, float] = {}
        tokens: dict[str, list[list[int]]] = {}
        for name, with_graphs in (("graphs", True), ("launches", False)):
            start = time.perf_counter()
            tokens[name] = generate(folder, prompts, args.tokens, with_graphs=with_graphs)
            torch.cuda.synchronize()
            seconds[name] = round(time.perf_counter() - start, 2)
            gc.collect()
            torch.cuda.empty_cache()
        reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
        checked = check(reference, prompts * 2, [*tokens["graphs"], *tokens["launches"]])
    result = report(
        args.seed,
        shape=f"llama-3-8b, {args.layers} layers",
        prompt_lengths=lengths,
        load_and_generate_s=seconds,
        sequences_equal_with_and_without_graphs=sum(
            map(list.__eq__, tokens["graphs"], tokens["launches"])
        ),
        checked=checked,
    )
    finish(result, args.out)
    complete = all(len(t) == args.tokens for run in tokens.values() for t in run)
    if not checked["within_2_epsilon"] or not complete:
        raise SystemExit("the output is not the reference's: the run is void")


if __name__ == "__main__":
    main()
