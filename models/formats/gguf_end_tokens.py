"""The end tokens of a GGUF file: those of its metadata, and tokens with the name of an end token, as in llama.cpp.

Converters write one end token, mostly that of a turn. A chat model may also write the one that ends a text, and a
model of code the one that begins another file.
"""

from .gguf_file import GgufFile

_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_NAMES = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
        # of models of code
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    )
)
"""Without those of model families whose GGUF files are not supported: in gpt-oss's, <|end|> does not end the output."""


def gguf_end_tokens(file: GgufFile) -> tuple[int, ...]:
    """Returns the ids, in ascending order."""
    given = (file.metadata.get(key) for key in _KEYS)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named = (token for token, name in enumerate(tokens if isinstance(tokens, list) else ()) if name in _NAMES)
    return tuple(sorted({*(token for token in given if isinstance(token, int)), *named}))
