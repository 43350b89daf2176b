"""From a plan to arrays. The builder mirrors the device's block tables on the host."""

import numpy as np

from hillstar.engine.plan import Batch, Plan


class BatchBuilder:
    """Owns the host's copy of every row's block table; called by the loop, plan after plan."""

    def __init__(self, *, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int32)

    def build(self, plan: Plan) -> Batch:
        """Apply the plan's block-table changes, then lay its tokens out in order of its rows."""
        for init in plan.inits:
            self._num_blocks[init.row] = 0
        for entry in plan.rows:
            if len(entry.new_blocks):
                used = int(self._num_blocks[entry.row])
                end = used + len(entry.new_blocks)
                self._tables[entry.row, used:end] = entry.new_blocks
                self._num_blocks[entry.row] = end

        rows = np.array([entry.row for entry in plan.rows], dtype=np.int32)
        starts = np.array([entry.start for entry in plan.rows], dtype=np.int32)
        counts = np.array([entry.num_tokens for entry in plan.rows], dtype=np.int32)
        cu_seqlens_q = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        context_lens = starts + counts

        # Positions count up from each row's start: global index - row's first index + start.
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32)
        positions += np.repeat(starts - cu_seqlens_q[:-1], counts)
        token_ids = np.full(len(positions), -1, dtype=np.int32)
        for i, entry in enumerate(plan.rows):
            if entry.token_ids is not None:
                token_ids[cu_seqlens_q[i] : cu_seqlens_q[i + 1]] = entry.token_ids

        width = max(1, -(-int(context_lens.max(initial=0)) // self._block_size))
        tables = self._tables[rows, :width]
        held = np.minimum(self._num_blocks[rows], width)
        tables[np.arange(width) >= held[:, None]] = 0
        blocks = tables[np.repeat(np.arange(len(rows)), counts), positions // self._block_size]
        slot_mapping = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        num_samples = np.array([entry.num_samples for entry in plan.rows], dtype=np.int32)
        sample_rows = np.repeat(np.arange(len(rows), dtype=np.int32), num_samples)
        # The last ones of a row: counted back from its end.
        ends = np.cumsum(num_samples)[sample_rows]
        sample_tokens = cu_seqlens_q[sample_rows + 1] - ends + np.arange(len(ends))
        return Batch(
            plan=plan,
            token_ids=token_ids,
            positions=positions,
            rows=rows,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=tables,
            slot_mapping=slot_mapping,
            sample_rows=sample_rows,
            sample_tokens=sample_tokens.astype(np.int32),
        )
