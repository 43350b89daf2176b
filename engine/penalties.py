"""What changes logits before a token is chosen: bias, penalties, forbidden end tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hillstar.engine.plan import RowInit


@dataclass(frozen=True, slots=True)
class _Row:
    """What one row asks for."""

    slot: int  # in the count tensors; -1: no penalties
    repetition: float
    presence: float
    frequency: float
    bias_ids: np.ndarray  # int64 [n]
    bias: np.ndarray  # float32 [n]
    end_ids: np.ndarray  # int64 [n]: forbidden before `first_end`
    first_end: int  # the first position at which the row may end


class Penalties:
    """Per-row changes of logits, in the order of `SamplingParams`; owned by the `Sampler`.

    Rows that ask for nothing cost nothing. Rows with penalties have a slot in two tensors over
    the vocabulary, `[num_slots, vocab]` on the device, which grow as slots are needed.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._rows: dict[int, _Row] = {}  # only rows that ask for something
        self._free_slots: list[int] = []
        self._num_outputs = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._is_seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def init(self, entry: RowInit) -> None:
        """A sequence enters a row: forget the one before, count this one's history."""
        old = self._rows.pop(entry.row, None)
        if old is not None and old.slot >= 0:
            self._free_slots.append(old.slot)
        params = entry.params
        has_penalties = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        if not (has_penalties or params.logit_bias or params.min_tokens):
            return
        end_ids = (() if params.ignore_eos else self._eos_token_ids) + params.stop_token_ids
        self._rows[entry.row] = _Row(
            slot=self._count_history(entry) if has_penalties else -1,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias_ids=np.array(list(params.logit_bias), dtype=np.int64),
            bias=np.array(list(params.logit_bias.values()), dtype=np.float32),
            end_ids=np.array(end_ids, dtype=np.int64),
            first_end=entry.num_prompt_tokens + params.min_tokens,
        )

    def _count_history(self, entry: RowInit) -> int:
        """Take a slot and fill it from the tokens so far."""
        if not self._free_slots:
            num_slots = len(self._is_seen)
            added = max(4, num_slots)
            self._num_outputs = _grown(self._num_outputs, added)
            self._is_seen = _grown(self._is_seen, added)
            self._free_slots.extend(range(num_slots, num_slots + added))
        slot = self._free_slots.pop()
        history = entry.history.astype(np.int64)
        counts = np.bincount(history[entry.num_prompt_tokens :], minlength=self._vocab_size)
        seen = np.bincount(history, minlength=self._vocab_size) > 0
        self._num_outputs[slot] = torch.from_numpy(counts.astype(np.int32)).to(
            self._num_outputs.device
        )
        self._is_seen[slot] = torch.from_numpy(seen).to(self._is_seen.device)
        return slot

    def apply(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Processed logits: `logits` itself when no row asks for anything, else a changed copy.

        logits: float32 `[S, vocab]`. rows, positions: `[S]`, as in `Sampler.sample`.
        """
        asking = [(i, self._rows[row]) for i, row in enumerate(rows.tolist()) if row in self._rows]
        if not asking:
            return logits
        logits = logits.clone()
        self._add_bias(logits, asking)
        self._penalise(logits, asking)
        early = [(i, row) for i, row in asking if positions[i] < row.first_end]
        if early:
            _put(logits, [(i, row.end_ids, -np.inf) for i, row in early], accumulate=False)
        return logits

    def _add_bias(self, logits: torch.Tensor, asking: list[tuple[int, _Row]]) -> None:
        biased = [(i, row.bias_ids, row.bias) for i, row in asking if len(row.bias_ids)]
        if biased:
            _put(logits, biased, accumulate=True)

    def _penalise(self, logits: torch.Tensor, asking: list[tuple[int, _Row]]) -> None:
        """Repetition divides positive logits of seen tokens and multiplies negative ones (Keskar
        et al. 2019, arXiv 1909.05858, section 4.1); presence and frequency are subtracted."""
        penalised = [(i, row) for i, row in asking if row.slot >= 0]
        if not penalised:
            return
        device = logits.device
        index = torch.tensor([i for i, _ in penalised], device=device)
        slots = torch.tensor([row.slot for _, row in penalised], device=device)
        repetition, presence, frequency = (
            torch.tensor(
                [(row.repetition, row.presence, row.frequency) for _, row in penalised],
                dtype=torch.float32,
                device=device,
            )
            .unsqueeze(-1)
            .unbind(1)
        )
        x = logits[index]
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(self._is_seen[slots], repeated, x)
        counts = self._num_outputs[slots]
        logits[index] = x - frequency * counts - presence * (counts > 0)

    def count(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Note what was chosen. token_ids: int64 `[S]` on the device."""
        slots = [
            (i, entry.slot) for i, row in enumerate(rows.tolist()) if (entry := self._rows.get(row))
        ]
        slots = [(i, slot) for i, slot in slots if slot >= 0]
        if not slots:
            return
        index, used = torch.tensor(slots, device=token_ids.device).unbind(1)
        chosen = token_ids[index]
        self._num_outputs[used, chosen] += 1
        self._is_seen[used, chosen] = True


def _grown(tensor: torch.Tensor, added: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(added, tensor.shape[1])))


def _put(
    logits: torch.Tensor,
    entries: Sequence[tuple[int, np.ndarray, np.ndarray | float]],
    *,
    accumulate: bool,
) -> None:
    """Write, or add, values at some tokens of some rows: (row of logits, token ids, values)."""
    rows = np.concatenate([np.full(len(ids), i) for i, ids, _ in entries])
    token_ids = np.concatenate([ids for _, ids, _ in entries])
    values = np.concatenate(
        [np.broadcast_to(np.float32(value), len(ids)) for _, ids, value in entries]
    )
    device = logits.device
    logits.index_put_(
        (torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device)),
        torch.from_numpy(values).to(device),
        accumulate=accumulate,
    )
