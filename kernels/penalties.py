"""Repetition, presence and frequency penalties on a batch of logits, in place.

For a token that a row has seen, in its prompt or its output, and produced n times:

    x = (x / repetition if x > 0 else x * repetition) if seen else x
    x = x - frequency * n - presence * (n > 0)

(repetition: Keskar et al. 2019, section 4.1, for logits of either sign).

What a row has seen lies in its *slot* of two tensors over the vocabulary, so that only rows with
penalties have one; a row with slot -1 is left as it is. Logit biases come before, forbidden
tokens after, both as scattered additions by the caller.

Grid `(num_rows, ceil(vocab / 1024))`; one program changes 1024 logits of a row. Bytes moved a
call: `vocab * (2 * 4 + 1 + counts' itemsize)` for each row that has a slot.
"""

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import check_tensor
from hillstar.kernels.jit import jit


def apply_penalties_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    is_seen: torch.Tensor,
    num_outputs: torch.Tensor,
    *,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """The specification of `apply_penalties`: same arguments, same effect."""
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        x, counts = logits[row], num_outputs[slot]
        repeated = torch.where(x > 0, x / repetition[row], x * repetition[row])
        x = torch.where(is_seen[slot].bool() | (counts > 0), repeated, x)
        logits[row] = x - frequency[row] * counts - presence[row] * (counts > 0)


@jit
def _penalties_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    is_seen: tl.tensor,
    num_outputs: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    stride_logits: tl.tensor,
    stride_seen: tl.tensor,
    stride_outputs: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab
    repetition = tl.load(repetitions + row)
    where = logits + row * stride_logits + tokens
    x = tl.load(where, mask=mask, other=0.0)
    counts = tl.load(num_outputs + slot * stride_outputs + tokens, mask=mask, other=0)
    seen = tl.load(is_seen + slot * stride_seen + tokens, mask=mask, other=0) != 0
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(seen | (counts > 0), repeated, x)
    x -= tl.load(frequencies + row) * counts.to(tl.float32)
    x -= tl.where(counts > 0, tl.load(presences + row), 0.0)
    tl.store(where, x, mask=mask)


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    is_seen: torch.Tensor,
    num_outputs: torch.Tensor,
    *,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Change the logits of every row that has a slot, in place.

    logits: float32 `[num_rows, vocab]`, rows may be strided. slots: int32 or int64 `[num_rows]`,
    -1 = none. is_seen: bool or uint8 `[num_slots, vocab]`, tokens of the prompt (those of the
    output may be in it too). num_outputs: int16 or int32 `[num_slots, vocab]`, how often each
    token is in the output; whoever counts stops at the dtype's maximum. repetition (1 = off),
    presence, frequency (0 = off): float32 `[num_rows]`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device, floats = logits.device, (torch.float32,)
    check_tensor("logits", logits, shape=(None, None), dtypes=floats, device=device)
    num_rows, vocab = logits.shape
    ints = (torch.int32, torch.int64)
    check_tensor("slots", slots, shape=(num_rows,), dtypes=ints, device=device)
    flags, counts = (torch.bool, torch.uint8), (torch.int16, torch.int32)
    check_tensor("is_seen", is_seen, shape=(None, vocab), dtypes=flags, device=device)
    num_slots = is_seen.shape[0]
    check_tensor("num_outputs", num_outputs, shape=(num_slots, vocab), dtypes=counts, device=device)
    for name, value in (
        ("repetition", repetition),
        ("presence", presence),
        ("frequency", frequency),
    ):
        check_tensor(name, value, shape=(num_rows,), dtypes=floats, device=device)
    if logits.numel() == 0:
        return
    block = min(1024, triton.next_power_of_2(vocab))
    _penalties_kernel[(num_rows, triton.cdiv(vocab, block))](
        logits,
        slots,
        is_seen.view(torch.uint8),
        num_outputs,
        repetition,
        presence,
        frequency,
        logits.stride(0),
        is_seen.stride(0),
        num_outputs.stride(0),
        vocab,
        BLOCK=block,
        num_warps=4,
    )
