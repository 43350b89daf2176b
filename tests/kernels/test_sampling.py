"""`sample` against its reference, and both against what the definitions say."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hillstar.kernels.noise import noise_bits, noise_keys
from hillstar.kernels.sampling import sample, sample_reference


def parameters(num_rows: int, device: torch.device, **changes: Any) -> dict[str, torch.Tensor]:
    """Per-row parameters, by default plain sampling at temperature 1; seeds count up from 0."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    seeds = torch.arange(num_rows, device=device)
    return {
        name: torch.full(
            (num_rows,),
            value,
            dtype=torch.int32 if name == "top_k" else torch.float32,
            device=device,
        )
        for name, value in values.items()
    } | {"keys": noise_keys(seeds, torch.full_like(seeds, 7))}


FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.7},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
]


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [(torch.float32, 1), (torch.float32, 5003), (torch.bfloat16, 777), (torch.float16, 64)],
    ids=str,
)
def test_agrees_with_the_reference(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, vocab: int
) -> None:
    """Rows with any filters in one batch give the reference's tokens; logits stay as they are."""
    rows = [parameters(1, device, **changes) for changes in FILTERS]
    given = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    given["keys"] = noise_keys(torch.arange(len(rows), device=device), given["top_k"].long())
    logits = torch.randn((len(rows), vocab + 3), device=device, generator=generator) * 3
    logits = logits.to(dtype)[:, :vocab]
    before = logits.clone()
    token_ids = sample(logits, **given)
    assert token_ids.tolist() == sample_reference(logits, **given).tolist()
    assert torch.equal(logits, before)


EXTREMES = {
    "temperature": [0.0, 0.01, 0.8, 1.7, 10.0],
    "top_k": [0, 1, 2, 40, 300, 5000],
    "top_p": [1.0, 0.0, 1e-6, 0.1, 0.9, 0.999999],
    "min_p": [0.0, 1e-4, 0.05, 1.0],
}


@pytest.mark.parametrize("vocab", [2, 33, 4097])
@pytest.mark.parametrize("scale", [0.0, 0.3, 20.0])
@pytest.mark.parametrize("kind", ["smooth", "ties", "sparse"])
def test_agrees_on_rows_of_every_kind(
    device: torch.device, generator: torch.Generator, vocab: int, scale: float, kind: str
) -> None:
    """Flat and peaked rows, many ties, few finite logits; filters at their ends, combined."""
    num_rows = 8
    logits = torch.randn((num_rows, vocab), device=device, generator=generator) * scale
    if kind == "ties":
        logits = logits.round()
    if kind == "sparse":
        few = torch.rand((num_rows, vocab), device=device, generator=generator) < 0.1
        logits = logits.masked_fill(~few, -math.inf)
    given = parameters(num_rows, device)
    for name, values in EXTREMES.items():
        drawn = torch.randint(len(values), (num_rows,), device=device, generator=generator)
        given[name] = torch.tensor(values, dtype=given[name].dtype, device=device)[drawn]
    assert sample(logits, **given).tolist() == sample_reference(logits, **given).tolist()


def test_ties_without_end_are_all_kept(device: torch.device) -> None:
    """Where every token ties with the k-th or the nucleus's last, any may be chosen."""
    logits = torch.zeros((40, 5000), device=device)
    for changes in ({"top_k": 2}, {"top_p": 0.1}, {"top_k": 7, "top_p": 0.5, "min_p": 1.0}):
        given = parameters(40, device, **changes)
        plain = sample(logits, **parameters(40, device))
        assert sample(logits, **given).tolist() == plain.tolist()
        assert plain.max() > 4000


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_a_graph_replays_it(device: torch.device, generator: torch.Generator) -> None:
    """Captured once, it chooses for whatever logits and parameters lie there at a replay."""
    logits = torch.zeros((16, 9000), device=device)
    given = parameters(16, device)
    sample(logits, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sample(logits, **given)
    logits.normal_(generator=generator).mul_(2)
    given["top_p"].fill_(0.8)
    given["top_k"][::2] = 30
    graph.replay()
    assert token_ids.tolist() == sample_reference(logits, **given).tolist()


def test_noise_is_the_definition_to_the_bit(device: torch.device) -> None:
    """Between equal logits the token with the smallest random word wins, exactly."""
    given = parameters(16, device)
    token_ids = sample(torch.zeros((16, 5000), device=device), **given)
    words = noise_bits(given["keys"].cpu().numpy(), np.arange(5000, dtype=np.int32))
    assert token_ids.tolist() == words.view(np.uint32).argmin(axis=1).tolist()


def test_greedy_ties_go_to_the_lowest_id(device: torch.device) -> None:
    """Among equal maxima, within a part of the vocabulary or across parts, the first wins."""
    logits = torch.zeros((2, 9000), device=device)
    logits[0, [4095, 4096, 8999]] = 1.0
    logits[1, [8998, 8999]] = 1.0
    token_ids = sample(logits, **parameters(2, device, temperature=0.0))
    assert token_ids.tolist() == [4095, 8998]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 0, 4}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.7}, {3, 0, 4}),
        ({"top_p": 0.97}, {3, 0, 4, 1}),
        ({"top_k": 3, "top_p": 0.6}, {3, 0, 4}),  # 0.55 of 0.95 is less than 0.6
        ({"min_p": 0.3}, {3, 0, 4}),
        ({"min_p": 0.05}, {3, 0, 4, 1}),
    ],
    ids=str,
)
def test_filters_keep_what_they_define(
    device: torch.device, changes: dict[str, Any], allowed: set[int]
) -> None:
    """Exactly the tokens of each filter are chosen, all that tie with the last one included."""
    # Probabilities 0.55, 0.2, 0.2, 0.045 and less; tokens 0 and 4 tie.
    probs = torch.tensor([0.2, 0.045, 0.004, 0.55, 0.2, 0.001], device=device)
    given = parameters(200, device, **changes)
    logits = probs.log().expand(200, -1)
    token_ids = sample_reference(logits, **given).tolist()
    assert set(token_ids) == allowed
    # The kernel on one row for each token allowed: it draws that token there.
    rows = [token_ids.index(token) for token in sorted(allowed)]
    some = {name: value[rows] for name, value in given.items()}
    assert sample(logits[rows], **some).tolist() == sorted(allowed)


def test_tokens_follow_the_softmax() -> None:
    """Over many seeds tokens come as often as the softmax at the temperature says."""
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5])
    wanted = (logits / 1.5).softmax(-1)
    num_draws = 4000
    given = parameters(num_draws, torch.device("cpu"), temperature=1.5)
    token_ids = sample_reference(logits.expand(num_draws, -1), **given)
    seen = Counter(token_ids.tolist())
    for token, p in enumerate(wanted.tolist()):
        deviation = math.sqrt(num_draws * p * (1 - p))
        assert abs(seen[token] - num_draws * p) < 4.5 * deviation


def test_forbidden_and_broken_logits(device: torch.device) -> None:
    """-inf and NaN are never chosen; a row of nothing else gives token 0."""
    logits = torch.full((6, 50), -math.inf, device=device)
    logits[:2, 17] = 1.0
    logits[2:4] = math.nan
    logits[2:4, 31] = -5.0
    given = parameters(6, device, top_p=0.9, min_p=0.1, top_k=4)
    given["temperature"][::2] = 0.0
    assert sample(logits, **given).tolist() == [17, 17, 31, 31, 0, 0]
    assert sample_reference(logits, **given).tolist() == [17, 17, 31, 31, 0, 0]


def test_a_row_does_not_depend_on_its_batch(
    device: torch.device, generator: torch.Generator
) -> None:
    """The same logits, seed and position give the same token alone and in a batch."""
    logits = torch.randn((5, 600), device=device, generator=generator)
    given = parameters(5, device, top_p=0.95)
    together = sample(logits, **given).tolist()
    alone = [
        sample(logits[i : i + 1], **{name: value[i : i + 1] for name, value in given.items()})
        for i in range(5)
    ]
    assert [int(token) for token in alone] == together


def test_no_rows_is_no_work(device: torch.device) -> None:
    """An empty batch gives no tokens."""
    assert sample(torch.empty((0, 9), device=device), **parameters(0, device)).shape == (0,)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("logits", torch.zeros(9)),
        ("logits", torch.zeros((2, 0))),
        ("logits", torch.zeros((9, 2)).T),
        ("temperature", torch.zeros(3)),
        ("top_k", torch.zeros(2)),
        ("top_p", torch.zeros(2, dtype=torch.float64)),
        ("min_p", torch.zeros((2, 1))),
        ("keys", torch.zeros((2, 2), dtype=torch.int64)),
    ],
)
def test_a_wrong_argument_is_named(device: torch.device, argument: str, bad: torch.Tensor) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    given: dict[str, Any] = {"logits": torch.zeros((2, 9), device=device)}
    given |= parameters(2, device)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        sample(**given | {argument: bad.to(device)})
