"""A field that is missing in config.json has the default of transformers, or the configuration is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from pdserve.common.errors import StartupError
from pdserve.models.config.model import ModelConfig
from pdserve.models.registry import FAMILIES, read_config_file

NOT_COMPARED = ("eos_token_id", "num_key_value_heads")
"""eos_token_id: the tokenizer has it too. num_key_value_heads: a wrong one is detected by the shapes of the weights."""


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig | None:
    """None if the configuration is refused."""
    (directory / "config.json").write_text(json.dumps(fields))
    try:
        return read_config_file(directory / "config.json")
    except StartupError:
        return None


@pytest.mark.parametrize("name", [family.architecture for family in FAMILIES])
def test_missing_fields_have_the_defaults_of_transformers(name: str, tmp_path: Path) -> None:
    family = "Gemma3Text" if name == "Gemma3ForCausalLM" else name.removesuffix("ForCausalLM")
    config_class = getattr(transformers, f"{family}Config")
    own = {"architectures": [name]}
    fields = config_class().to_dict() | own
    assert read(tmp_path, fields) is not None
    for field in fields.keys() - {"architectures", *NOT_COMPARED}:
        others = {key: value for key, value in fields.items() if key != field}
        found = read(tmp_path, others)
        assert found is None or found == read(tmp_path, config_class.from_dict(others).to_dict() | own), field
