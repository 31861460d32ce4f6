"""The end tokens of a Hugging Face model. No torch."""

from pathlib import Path

from ...common.errors import StartupError
from ..formats.bounds import most_of
from ..formats.json_fields import Json, read_json, shown
from ..formats.tokenizer_settings import tokenizer_end_token


def hf_end_tokens(directory: Path, raw: Json) -> tuple[int, ...]:
    """As in SGLang and vLLM: those of both configurations and that of the tokenizer."""
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    ids: set[int] = set()
    for source, value in ((directory / "config.json", raw), (generation_path, generation)):
        found = value.get("eos_token_id")
        for token in found if isinstance(found, list) else [] if found is None else [found]:
            if isinstance(token, bool) or not isinstance(token, int) or token > most_of("eos_token_id"):
                raise StartupError(f"{source}: eos_token_id must be a token id or a list of them, got {shown(found)}")
            if token >= 0:  # -1 stands for none
                ids.add(token)
    if (own := tokenizer_end_token(directory)) is not None:
        ids.add(own)
    return tuple(sorted(ids))
