"""The engine's loop in a process of its own, without a server: the yardstick of `cpu_server`.

    python bench/engine_alone.py MODEL_DIR PROMPT NUM_TOKENS

For every line it reads it generates NUM_TOKENS greedy tokens after the chat prompt of PROMPT,
bf16, one sequence, and prints as JSON the text they make and the seconds from the first token to
the last. From the second on the prompt's KV is found, as it is in a server: fewer tokens of it are
computed at once, bf16 rounds otherwise, and the text may be another than the first.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

from hillstar.engine.assembly import assemble
from hillstar.engine.channel import QueueChannel
from hillstar.engine.config import EngineConfig
from hillstar.engine.messages import Frame, SamplingParams, Submit
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import load_weights
from hillstar.server.items import Message
from hillstar.server.request import CreateResponse
from hillstar.server.text import Tokenizer

MAX_MODEL_LEN = 2048


def main() -> None:
    folder, text, num_tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    config = EngineConfig(
        model_dir=folder,
        model_name="bench",
        dtype="bfloat16",
        num_blocks=512,
        max_num_seqs=8,
        speculation=False,  # what is drafted depends on timing, and bf16 rounds by the batch
    )
    model = ModelConfig.from_dir(folder)
    weights = load_weights(folder, model, dtype=torch.bfloat16)
    channel = QueueChannel()
    engine = assemble(config, model, weights, inbox=channel, outbox=channel)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # these two as the engine process does
    gc.freeze()
    tokenizer = Tokenizer(folder)
    request = CreateResponse(input=(Message("user", (text,)),))
    prompt = tokenizer.build_prompt(None, request, max_model_len=MAX_MODEL_LEN)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    num_submitted = 0

    def generate() -> tuple[list[int], float]:
        nonlocal num_submitted
        num_submitted += 1
        channel.post(
            Submit(sequence_id=str(num_submitted), prompt_ids=prompt.prompt_ids, params=params)
        )
        token_ids: list[int] = []
        first_s = 0.0
        while len(token_ids) < num_tokens:
            engine.loop.step()
            while not channel.outputs.empty():
                message = channel.outputs.get()
                if isinstance(message, Frame):
                    for output in message.outputs:
                        token_ids += output.token_ids
            first_s = first_s or (time.perf_counter() if token_ids else 0.0)
        return token_ids, time.perf_counter() - first_s

    for _ in sys.stdin:
        token_ids, seconds = generate()
        print(json.dumps([tokenizer.decode(token_ids), seconds]), flush=True)


if __name__ == "__main__":
    main()
