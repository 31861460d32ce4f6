"""End tokens of GGUF files."""

from pathlib import Path

import gguf
import pytest

from pdserve.models.formats.gguf_end_tokens import gguf_end_tokens
from pdserve.models.formats.gguf_file import GgufFile


def written(path: Path, tokens: list[str], **ids: int) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    if tokens:
        writer.add_token_list(tokens)
    for key, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize(
    ("tokens", "ids", "ends"),
    [
        (["<|endoftext|>", "a", "<|im_start|>", "<|im_end|>"], {"eos": 3}, (0, 3)),  # Qwen2.5
        (["<|begin_of_text|>", "<|end_of_text|>", "a", "<|eom_id|>", "<|eot_id|>"], {"eos": 4}, (1, 3, 4)),  # Llama 3
        (["<|im_end|>", "<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {"eos": 0}, (0, 2, 3, 4)),
        (["a", "b", "c", "<|END|>"], {"eos": 0, "eot": 1, "eom": 2}, (0, 1, 2)),
        ([], {"eos": 5}, (5,)),
        (["a", "</s>"], {}, ()),
    ],
    ids=("qwen", "llama", "code", "ids", "no vocabulary", "none"),
)
def test_end_tokens_are_those_of_the_metadata_and_those_with_a_known_name(
    tmp_path: Path, tokens: list[str], ids: dict[str, int], ends: tuple[int, ...]
) -> None:
    assert gguf_end_tokens(written(tmp_path / "model.gguf", tokens, **ids)) == ends
