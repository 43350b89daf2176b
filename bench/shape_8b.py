"""The shape of Llama-3-8B, as a Hugging Face configuration spells it.

No imports: a start of the engine is timed by a program that knows it.
"""

SEED = 20261129
VOCAB = 128256

SHAPE_8B = {
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
