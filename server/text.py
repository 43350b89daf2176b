"""Text and token ids: one facade over a model folder's tokenizer and chat template.

Everything here is pure and synchronous; callers run `build_prompt` in a thread pool. The
tokenizer's Rust code releases the GIL while it encodes; what holds it (rendering, ids to numpy) is
bounded by the length check that comes first.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from hillstar.server.detokenize import IncrementalDecoder, TokenTable
from hillstar.server.prompt import ParentContext, PastTurn, Prompt, PromptBuilder, Vocabulary
from hillstar.server.request import CreateResponse
from hillstar.server.template import load_template

__all__ = ["ParentContext", "PastTurn", "Prompt", "Tokenizer"]


class _TokenizerFile(msgspec.Struct):
    """The parts of `tokenizer.json` that are read here."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


class Tokenizer:
    """The tokenizer and chat template of a model folder. Immutable after loading: any thread."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ValueError that says what of `model_dir` is missing or not understood."""
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{model_dir} has no tokenizer.json")
        parts = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
        if parts.decoder is None:
            raise ValueError(f"{file} has no decoder: its tokens cannot be turned into text")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._plain = tokenizers.Tokenizer.from_file(str(file))
        self._plain.encode_special_tokens = True  # their names are text like any other
        for tokenizer in (self._tokenizer, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        names = [self._tokenizer.id_to_token(token_id) for token_id in range(self.vocab_size)]
        self._table = TokenTable(names, frozenset(special.values()), parts.decoder)
        # A normalizer may shorten the text before it is cut into tokens.
        shrinkage = 1 if parts.normalizer is None else _MAX_NORMALIZER_SHRINKAGE
        self._anchor = next(iter(special), "")
        self._builder = PromptBuilder(
            load_template(model_dir),
            Vocabulary(
                encode=self._encode,
                encode_inner=self._encode_inner,
                encode_plain=self._encode_plain,
                special=special,
                longest_token_bytes=self._table.longest * shrinkage,
            ),
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it is, names of special tokens understood: no BOS, no template."""
        ids: list[int] = self._encode(text).tolist()
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of a whole sequence, special tokens left out."""
        decoder = self.decoder()
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def decoder(self) -> IncrementalDecoder:
        """A fresh incremental decoder for one response."""
        return IncrementalDecoder(self._table)

    def build_prompt(
        self, parent: ParentContext | None, request: CreateResponse, *, max_model_len: int
    ) -> Prompt:
        """The ids of the next turn. Raises ApiError: the template refuses, or it can never fit."""
        return self._builder.build(parent, request, max_model_len=max_model_len)

    def _encode(self, text: str) -> np.ndarray:
        return _ids(self._tokenizer, text)

    def _encode_inner(self, text: str) -> np.ndarray:
        """Encode after a special token: some tokenizers put a space before what comes first."""
        if not self._anchor:
            return self._encode(text)
        return _ids(self._tokenizer, self._anchor + text)[1:]

    def _encode_plain(self, text: str) -> np.ndarray:
        return _ids(self._plain, text)


_MAX_NORMALIZER_SHRINKAGE = 4  # NFC joins at most four bytes' worth into one


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    """int32 `[num_tokens]`. As a batch of one without offsets: that way the GIL is released."""
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, dtype=np.int32)
