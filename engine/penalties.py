"""What changes logits before a token is chosen: biases, penalties, forbidden end tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillstar.engine.plan import RowInit
from hillstar.engine.sampling_ops import Changes
from hillstar.engine.transfer import to_device


@dataclass(frozen=True, slots=True)
class _Biases:
    """Of one row."""

    ids: np.ndarray  # int32 [n]
    values: np.ndarray  # float32 [n]
    num_forbidden: int  # the first of these are end tokens, with -inf …
    first_end: int  # … up to the first position at which the row may end


class Penalties:
    """What rows ask to be changed, and what they have seen; owned by the `Sampler`.

    Rows that ask for nothing cost nothing. Rows with penalties have a slot in `history`, on the
    device (see `SamplingOps`), which grows as slots are needed.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._biases: dict[int, _Biases] = {}  # only rows that have any
        self._slots = np.full(max_num_seqs, -1, dtype=np.int32)  # -1: no penalties
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._free_slots: list[int] = []
        self.history = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def init(self, entry: RowInit) -> None:
        """A sequence enters a row: forget the one before, count this one's history."""
        row, params = entry.row, entry.params
        if self._slots[row] >= 0:
            self._free_slots.append(int(self._slots[row]))
            self._slots[row] = -1
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        if (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        ):
            self._slots[row] = self._count_history(entry)
        self._biases.pop(row, None)
        if params.logit_bias or params.min_tokens:
            end_ids = (() if params.ignore_eos else self._eos_token_ids) + params.stop_token_ids
            forbidden = end_ids if params.min_tokens else ()
            values = [*(-np.inf for _ in forbidden), *params.logit_bias.values()]
            self._biases[row] = _Biases(
                ids=np.array([*forbidden, *params.logit_bias], dtype=np.int32),
                values=np.array(values, dtype=np.float32),
                num_forbidden=len(forbidden),
                first_end=entry.num_prompt_tokens + params.min_tokens,
            )

    def _count_history(self, entry: RowInit) -> int:
        """Take a slot and fill it from the tokens so far, in order of the device's stream."""
        if not self._free_slots:
            num_slots = len(self.history)
            added = max(4, num_slots)
            more = self.history.new_zeros(added, self.history.shape[1])
            self.history = torch.cat((self.history, more))
            self._free_slots.extend(range(num_slots, num_slots + added))
        slot = self._free_slots.pop()
        token_ids = to_device(entry.history.astype(np.int64), self.history.device)
        prompt, outputs = token_ids.tensor_split([entry.num_prompt_tokens])
        counts = self.history[slot].zero_().index_fill_(0, prompt, 1)
        counts.index_add_(0, outputs, torch.full_like(outputs, 2, dtype=torch.int32))
        return slot

    def changes(self, rows: np.ndarray, positions: np.ndarray) -> Changes | None:
        """What the rows of a step ask for; None if nothing.

        rows, positions: `[S]`, as in `Sampler.sample`.
        """
        slots = self._slots[rows]
        indices, ids, values = self._biases_of(rows, positions)
        if not ids and slots.max(initial=-1) < 0:
            return None
        none = np.empty(0)
        return Changes(
            bias_rows=np.repeat(indices, [len(part) for part in ids]).astype(np.int32),
            bias_ids=np.concatenate([none, *ids]).astype(np.int32),
            bias=np.concatenate([none, *values]).astype(np.float32),
            slots=slots,
            repetition=self._repetition[rows],
            presence=self._presence[rows],
            frequency=self._frequency[rows],
        )

    def _biases_of(
        self, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
        """Of the rows of a step that have any now: index in the step, token ids, values."""
        indices, ids, values = [], [], []
        for index, row in enumerate(rows.tolist() if self._biases else ()):
            biases = self._biases.get(row)
            if biases is None:
                continue
            may_end = positions[index] >= biases.first_end
            first = biases.num_forbidden if may_end else 0
            if first < len(biases.ids):
                indices.append(index)
                ids.append(biases.ids[first:])
                values.append(biases.values[first:])
        return indices, ids, values
