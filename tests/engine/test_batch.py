"""The arrays of a batch say what its plan says."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.messages import SamplingParams
from hillstar.engine.plan import Plan, PlanRow, RowInit

SIZE = 4


def _init(row: int) -> RowInit:
    return RowInit(row, SamplingParams(max_tokens=1), 1, np.zeros(1, np.int32))


def _row(row: int, start: int, num_tokens: int, new_blocks: Sequence[int]) -> PlanRow:
    return PlanRow(row, start, num_tokens, np.arange(num_tokens), np.array(new_blocks, int), True)


def test_a_mixed_step_is_laid_out_in_order_of_its_rows() -> None:
    """A chunk of a prompt, then a decode from a token that is still on the device."""
    builder = BatchBuilder(max_num_seqs=4, max_blocks=8, block_size=SIZE)
    builder.build(Plan(0, (_row(2, 0, 4, (5,)),), inits=(_init(2),)))
    chunk = PlanRow(0, 0, 6, np.array([9, 8, 7, 6, 5, 4]), np.array([3, 1]), False)
    decode = PlanRow(2, 4, 1, None, np.array([7]), True)
    batch = builder.build(Plan(1, (chunk, decode), inits=(_init(0),)))
    assert batch.token_ids.tolist() == [9, 8, 7, 6, 5, 4, -1]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 4]
    assert batch.rows.tolist() == [0, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 6, 7]
    assert batch.context_lens.tolist() == [6, 5]
    assert batch.block_tables.tolist() == [[3, 1], [5, 7]]
    assert batch.slot_mapping.tolist() == [12, 13, 14, 15, 4, 5, 28]
    assert batch.sample_rows.tolist() == [1]


def test_an_init_empties_the_rows_block_table() -> None:
    """A row's next sequence sees nothing of the one before."""
    builder = BatchBuilder(max_num_seqs=1, max_blocks=8, block_size=SIZE)
    builder.build(Plan(0, (_row(0, 0, 8, (5, 6)),), inits=(_init(0),)))
    batch = builder.build(Plan(1, (_row(0, 0, 4, (2,)),), inits=(_init(0),)))
    assert batch.block_tables.tolist() == [[2]]
    assert batch.slot_mapping.tolist() == [8, 9, 10, 11]


@given(st.data())
def test_every_token_lies_where_its_table_says(data: st.DataObject) -> None:
    """By the plain definition, token by token, for random steps."""
    builder = BatchBuilder(max_num_seqs=3, max_blocks=20, block_size=SIZE)
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    next_block = 0
    for step in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        entries = []
        for row in rows:
            start, num_tokens = lengths.get(row, 0), data.draw(st.integers(1, 9))
            table = tables.setdefault(row, [])
            new = -(-(start + num_tokens) // SIZE) - len(table)
            blocks = tuple(range(next_block, next_block + new))
            next_block += new
            table += blocks
            lengths[row] = start + num_tokens
            entries.append(_row(row, start, num_tokens, blocks))
        batch = builder.build(Plan(step, tuple(entries)))
        expected = [
            (position, tables[entry.row][position // SIZE] * SIZE + position % SIZE)
            for entry in entries
            for position in range(entry.start, entry.start + entry.num_tokens)
        ]
        assert list(zip(batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True)) == (
            expected
        )
