"""The whole engine on random weights of the Llama-3-8B shape, stepped by a GPU benchmark."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hillstar.engine.assembly import assemble
from hillstar.engine.channel import QueueChannel
from hillstar.engine.config import EngineConfig
from hillstar.engine.messages import Cancel, Frame, SamplingParams, Submit, pack_ids
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.weights import LayerWeights, Matrix, Weights
from shape_8b import SEED, SHAPE_8B


@dataclass(frozen=True, slots=True)
class Result:
    """What a batch of requests took: seconds to each first token and to the end."""

    first_s: list[float]
    total_s: float
    tokens: list[list[int]]


class Driver:
    """The engine and the queues to it, stepped in this thread."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        *,
        num_blocks: int = 16384,
        max_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        inter_token_target_ms: int | None = None,
    ) -> None:
        config = EngineConfig(
            model_dir=Path("random-8b"),
            model_name="random-8b",
            device="cuda",
            num_blocks=num_blocks,
            max_model_len=36864,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            inter_token_target_ms=inter_token_target_ms,
        )
        self._channel = QueueChannel()
        self._engine = assemble(config, model, weights, inbox=self._channel, outbox=self._channel)
        self._base = 0  # sequences before those submitted last
        self._tokens: list[list[int]] = []
        self._first_s: list[float] = []
        self._num_running = 0

    def run(self, prompts: list[np.ndarray], num_tokens: int, lease: str | None = None) -> Result:
        """All requests at once, until the last one's last token."""
        start = time.perf_counter()
        self.submit(prompts, num_tokens, lease)
        self.drain()
        total_s = time.perf_counter() - start
        torch.cuda.synchronize()  # a step in flight feeds no one
        return Result([s - start for s in self._first_s], total_s, self._tokens)

    def submit(self, prompts: list[np.ndarray], num_tokens: int, lease: str | None = None) -> None:
        """Requests whose tokens are told apart by their index in `prompts`."""
        self._base += len(self._tokens)
        self._tokens, self._first_s = [], []
        self.add(prompts, num_tokens, lease)

    def add(self, prompts: list[np.ndarray], num_tokens: int, lease: str | None = None) -> None:
        """Further requests beside those that run; their indices go on."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self._channel.post(
                Submit(
                    sequence_id=str(self._base + len(self._tokens)),
                    prompt_ids=pack_ids(prompt),
                    params=params,
                    lease_id=lease,
                )
            )
            self._tokens.append([])
            self._first_s.append(0.0)
        self._num_running += len(prompts)

    def has_first_token(self, index: int) -> bool:
        return bool(self._tokens[index])

    def drain(self) -> None:
        """Step until all that was submitted has ended."""
        while self._num_running:
            self.step()

    def cancel(self) -> list[list[int]]:
        """End all that runs, and say what it had said."""
        for index in range(len(self._tokens)):
            self._channel.post(Cancel(sequence_id=str(self._base + index)))
        self.drain()
        return self._tokens

    def step(self) -> None:
        self._engine.loop.step()
        while not self._channel.outputs.empty():
            frame = self._channel.outputs.get_nowait()
            assert isinstance(frame, Frame), "the loop only sends frames"
            for output in frame.outputs:
                index = int(output.sequence_id) - self._base
                if not self._tokens[index]:
                    self._first_s[index] = time.perf_counter()
                self._tokens[index] += output.token_ids
                if output.finish is not None:
                    assert output.finish.reason in ("length", "cancelled"), output.finish
                    self._num_running -= 1


def config_8b(**changes: int) -> LlamaConfig:
    """The shape for transformers, in bf16."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaConfig(**{**SHAPE_8B, **changes}, rope_parameters=rope, dtype="bfloat16")


def make_reference() -> LlamaForCausalLM:
    """Random bf16 weights of the 8B shape, made on the device."""
    torch.manual_seed(SEED)
    config = config_8b()
    # Not `.to(bfloat16)` afterwards: that would round the rotary frequencies as well.
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def take_weights(reference: LlamaForCausalLM) -> Weights:
    """The engine's layout of the reference's parameters (a copy where matrices are joined)."""
    layers = []
    for layer in reference.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight.data,
                qkv=Matrix(torch.cat([projection.weight.data for projection in projections])),
                qkv_bias=None,
                q_norm=None,
                k_norm=None,
                o=Matrix(attention.o_proj.weight.data),
                post_norm=layer.post_attention_layernorm.weight.data,
                gate_up=Matrix(torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])),
                down=Matrix(mlp.down_proj.weight.data),
            )
        )
    return Weights(
        embedding=reference.model.embed_tokens.weight.data,
        layers=tuple(layers),
        norm=reference.model.norm.weight.data,
        lm_head=reference.lm_head.weight.data,
    )


def idle_share(profile: torch.profiler.profile) -> float:
    """Of a traced span, the share in which no kernel and no copy ran. Tracing slows the host, so
    this is an upper bound."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    begin, covered, end = spans[0][0], 0.0, spans[0][0]
    for left, right in spans:
        covered += max(0.0, right - max(left, end))
        end = max(end, right)
    return 1 - covered / (end - begin)
