"""A GGUF's tokenizer metadata -> a Hugging Face tokenizer.

GGUF stores the vocabulary, token types and merges (or scores), but of the splitting before BPE
only a name, `tokenizer.ggml.pre`. Each supported name is spelled out here; a name that is not
here is refused, because a wrong split is a different model that merely looks alike.
"""

from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from hillstar.engine.models.gguf_file import Metadata

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's visible space


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The split that Llama 3 and Qwen 2 share but for how digits group, then bytes."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # contractions
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with at most one sign before it
        rf"|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation with the line ends after it
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pre_tokenizer(pre: str, metadata: Metadata) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return gpt2
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    if pre in _QWEN:
        return _words(r"\p{N}")
    if pre in _LLAMA3:
        return _words(r"\p{N}{1,3}")
    supported = ("gpt-2", "smollm", *_QWEN, *_LLAMA3)
    raise metadata.error(
        f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(supported)}"
    )


_QWEN = ("qwen2", "deepseek-r1-qwen")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` of a GGUF describes.

    Control tokens become special tokens, user-defined ones plain added tokens. Raises
    ModelError for an unknown kind of tokenizer and for missing metadata.
    """
    kind = metadata.require(_KEY + "model", str)
    tokens = metadata.require_list(_KEY + "tokens", str)
    types = metadata.require_list(_KEY + "token_type", int)
    if len(set(tokens)) != len(tokens):
        raise metadata.error("the vocabulary names a token twice")
    if len(types) != len(tokens):
        raise metadata.error(f"{len(tokens)} tokens, but {len(types)} token types")
    if kind == "gpt2":
        tokenizer = _byte_bpe(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(metadata, tokens, types)
    else:
        raise metadata.error(f"tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == _TokenType.CONTROL or (type_ == _TokenType.UNKNOWN and kind == "llama"):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == _TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = _token(metadata, "bos", tokens)
    if bos is not None and metadata.require(_KEY + "add_bos_token", bool, kind == "llama"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return tokenizer


def tokenizer_config(metadata: Metadata, max_length: int) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`: special tokens and the chat template."""
    tokens = metadata.require_list(_KEY + "tokens", str)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": metadata.get("tokenizer.chat_template", str),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        config[f"{name}_token"] = _token(metadata, key, tokens)
    return {name: value for name, value in config.items() if value is not None}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """The ids that end a turn: end of sequence, of turn and of message, each once."""
    ids = (metadata.get(f"{_KEY}{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return sorted({one for one in ids if one is not None})


def _byte_bpe(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE: GPT-2's alphabet of 256 printable characters, merges in rank order."""
    pre = metadata.require(_KEY + "pre", str, "default")
    lines = metadata.require_list(_KEY + "merges", str)
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    vocab = {token: i for i, token in enumerate(tokens)}
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise metadata.error(f"merge '{left} {right}' needs tokens that are not there")
    # Llama 3's vocabulary has words that its merges cannot build.
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3)
    tokenizer = Tokenizer(bpe)
    if pre in _QWEN:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, metadata)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose union scores highest merges first.

    As merges in rank order that is: every split of every piece into two pieces, best piece
    first.
    """
    scores = metadata.require_list(_KEY + "scores", float)
    if len(scores) != len(tokens):
        raise metadata.error(f"{len(tokens)} tokens, but {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    splits = [
        (scores[i], token[:cut], token[cut:])
        for i, token in enumerate(tokens)
        if types[i] == _TokenType.NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    splits.sort(key=lambda split: split[0], reverse=True)
    bpe = models.BPE(
        vocab=vocab,
        merges=[(left, right) for _, left, right in splits],
        unk_token=_token(metadata, "unknown", tokens),
        fuse_unk=True,
        byte_fallback=_TokenType.BYTE in types,
    )
    tokenizer = Tokenizer(bpe)
    to_space: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if metadata.require(_KEY + "add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        to_space.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(to_space)
    return tokenizer


def _token(metadata: Metadata, name: str, tokens: list[str]) -> str | None:
    """The text of the token that `tokenizer.ggml.<name>_token_id` names."""
    token_id = metadata.get(f"{_KEY}{name}_token_id", int)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise metadata.error(f"{name}_token_id is {token_id}, of {len(tokens)} tokens")
    return tokens[token_id]
