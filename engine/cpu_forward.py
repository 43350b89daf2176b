"""The forward pass on a CPU: the batch's own arrays, no copies, no padding."""

import numpy as np
import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.fixed_torch_ops import FixedTorchOps
from hillstar.engine.models.llama import Decoder
from hillstar.engine.models.torch_ops import TorchOps
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Batch


class CpuForward:
    """The `Forward` of a CPU."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KVCache,
        *,
        max_position: int,
        last_tokens: torch.Tensor,
        deterministic: bool,
    ) -> None:
        """last_tokens: int32 `[max_num_seqs]`, the last sampled token of every row.
        deterministic: a token's logits are the same bits whatever is computed beside it."""
        make_ops = FixedTorchOps if deterministic else TorchOps
        ops = make_ops(config, dtype=weights.embedding.dtype, max_position=max_position)
        self._decoder = Decoder(config, weights, ops)
        self._attention = ops.attention(cache)
        self._last_tokens = last_tokens

    def __call__(self, batch: Batch) -> torch.Tensor:
        """See `Forward`."""
        tokens = batch.sample_tokens.astype(np.int64)
        sampled = None if len(tokens) == len(batch.token_ids) else torch.from_numpy(tokens)
        return self._decoder.forward(self._fed_tokens(batch), sampled, self._attention(batch))

    def _fed_tokens(self, batch: Batch) -> torch.Tensor:
        """int64 `[T]`, each row's last sampled token in its place."""
        token_ids = batch.token_ids.astype(np.int64)
        fed_back = np.flatnonzero(token_ids < 0)
        if len(fed_back):
            rows = np.repeat(batch.rows, np.diff(batch.cu_seqlens_q))[fed_back]
            token_ids[fed_back] = self._last_tokens.numpy()[rows]
        return torch.from_numpy(token_ids)
