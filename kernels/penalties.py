"""What changes logits before a token is chosen, in place: biases and penalties of a batch.

For a token that a row has seen, in its prompt or its output, and produced n times:

    x = x + bias
    x = (x / repetition if x > 0 else x * repetition) if seen else x
    x = x - frequency * n - presence * (n > 0)

(repetition: Keskar et al. 2019, section 4.1, for logits of either sign). A bias of -inf forbids.

What a row has seen lies in its *slot* of `history`, so that only rows with penalties have one: for
each token 2 n, and 1 more if it is in the prompt. A row with slot -1 is left as it is.

* `add_bias`, grid `(ceil(num_biases / 256),)`.
* `apply_penalties`, grid `(ceil(vocab / 4096), num_rows)`; reads the history of every row that has
  a slot, `4 * vocab` bytes, and of logits only those of tokens seen.
* `count_tokens`, grid `(ceil(num_rows / 256),)`: after the choice, adds to the history.
"""

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import check_tensor
from hillstar.kernels.jit import jit, jit_with


def add_bias_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """The specification of `add_bias`: same arguments, same effect."""
    logits.index_put_((rows.long(), token_ids.long()), bias, accumulate=True)


def apply_penalties_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    *,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """The specification of `apply_penalties`: same arguments, same effect."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        x, counts = logits[row], history[slot] >> 1
        repeated = torch.where(x > 0, x / repetition[row], x * repetition[row])
        x = torch.where(history[slot] > 0, repeated, x)
        logits[row] = x - frequency[row] * counts - presence[row] * (counts > 0)


def count_tokens_reference(
    history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """The specification of `count_tokens`: same arguments, same effect."""
    has_slot = slots >= 0
    history[slots[has_slot].long(), token_ids[has_slot].long()] += 2


@jit_with(do_not_specialize=["num_biases"])
def _bias_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    biases: tl.tensor,
    stride: tl.tensor,
    num_biases: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_biases
    row = tl.load(rows + index, mask=mask, other=0).to(tl.int64)
    token = tl.load(token_ids + index, mask=mask, other=0)
    # Atomic, as a token may be both biased and forbidden.
    bias = tl.load(biases + index, mask=mask, other=0.0)
    tl.atomic_add(logits + row * stride + token, bias, mask=mask, sem="relaxed")


@jit
def _penalties_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    history: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    stride_logits: tl.tensor,
    stride_history: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(history + slot * stride_history + tokens, mask=tokens < vocab, other=0)
    seen, counts = entries > 0, entries >> 1
    repetition = tl.load(repetitions + row)
    where = logits + row * stride_logits + tokens
    x = tl.load(where, mask=seen, other=1.0)  # 0 would be divided on a slow path
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= tl.load(frequencies + row) * counts.to(tl.float32)
    x -= tl.where(counts > 0, tl.load(presences + row), 0.0)
    tl.store(where, x, mask=seen)


@jit_with(do_not_specialize=["num_rows"])
def _count_kernel(
    history: tl.tensor,
    slots: tl.tensor,
    token_ids: tl.tensor,
    stride: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    token = tl.load(token_ids + rows, mask=rows < num_rows, other=0)
    where = history + slot * stride + token
    entries = tl.load(where, mask=slot >= 0, other=0)
    tl.store(where, entries + 2, mask=slot >= 0)


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """Add to some tokens' logits, in place; what is added to one twice is added up.

    logits: float32 `[num_rows, vocab]`, rows may be strided. rows, token_ids: int32
    `[num_biases]`, which exist. bias: float32 `[num_biases]`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device, ints, floats = logits.device, (torch.int32,), (torch.float32,)
    check_tensor("logits", logits, shape=(None, None), dtypes=floats, device=device)
    check_tensor("rows", rows, shape=(None,), dtypes=ints, device=device)
    check_tensor("token_ids", token_ids, shape=rows.shape, dtypes=ints, device=device)
    check_tensor("bias", bias, shape=rows.shape, dtypes=floats, device=device)
    if len(rows):
        _bias_kernel[(triton.cdiv(len(rows), 256),)](
            logits, rows, token_ids, bias, logits.stride(0), len(rows), BLOCK=256, num_warps=4
        )


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    *,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Change the logits of every row that has a slot, in place.

    logits: float32 `[num_rows, vocab]`, rows may be strided. slots: int32 `[num_rows]`, -1 =
    none. history: int32 `[num_slots, vocab]`. repetition (1 = off), presence, frequency (0 =
    off): float32 `[num_rows]`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device, ints, floats = logits.device, (torch.int32,), (torch.float32,)
    check_tensor("logits", logits, shape=(None, None), dtypes=floats, device=device)
    num_rows, vocab = logits.shape
    check_tensor("slots", slots, shape=(num_rows,), dtypes=ints, device=device)
    check_tensor("history", history, shape=(None, vocab), dtypes=ints, device=device)
    for name, value in (
        ("repetition", repetition),
        ("presence", presence),
        ("frequency", frequency),
    ):
        check_tensor(name, value, shape=(num_rows,), dtypes=floats, device=device)
    if logits.numel() == 0:
        return
    block = min(4096, triton.next_power_of_2(vocab))
    _penalties_kernel[(triton.cdiv(vocab, block), num_rows)](
        logits,
        slots,
        history,
        repetition,
        presence,
        frequency,
        logits.stride(0),
        history.stride(0),
        vocab,
        BLOCK=block,
        num_warps=8,
    )


def count_tokens(history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Note the token that each row with a slot has produced, in place.

    history: int32 `[num_slots, vocab]`. slots: int32 `[num_rows]`, each at most once; -1 = none.
    token_ids: int32 `[num_rows]`, within the vocabulary.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device, ints = history.device, (torch.int32,)
    check_tensor("history", history, shape=(None, None), dtypes=ints, device=device)
    check_tensor("slots", slots, shape=(None,), dtypes=ints, device=device)
    check_tensor("token_ids", token_ids, shape=slots.shape, dtypes=ints, device=device)
    if len(slots):
        _count_kernel[(triton.cdiv(len(slots), 256),)](
            history, slots, token_ids, history.stride(0), len(slots), BLOCK=256, num_warps=4
        )
