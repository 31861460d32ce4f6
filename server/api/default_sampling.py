"""Sampling defaults that a checkpoint recommends in `generation_config.json`."""

import logging
from typing import Any

import msgspec

from ...common.errors import StartupError
from ...common.sampling import NEUTRAL_SAMPLING, SamplingParams
from ...models.formats.json_fields import read_json
from ...models.loading.catalog import EMBEDDED_MODEL, ModelSource
from .common.fields import FieldError, validate
from .common.sampling_fields import DistributionFields

log = logging.getLogger("pdserve.frontend")


EMBEDDED_RECOMMENDATION = {"temperature": 0.2, "top_p": 0.9}
"""What the authors of SmolLM2 recommend: at temperature 1, a model of this size writes nonsense."""


def read_default_sampling(source: ModelSource) -> SamplingParams:
    """Returns the recommended values, as SGLang and vLLM read them, and neutral values for everything else.

    Raises StartupError for a value that would be invalid in a request. GGUF files have no recommendations; that for the
    embedded model is in this file.
    """
    origin, values = _recommendation(source)
    try:
        recommended = validate(DistributionFields, values).distribution(NEUTRAL_SAMPLING, source.config.vocab_size)
    except FieldError as error:
        raise StartupError(f"{origin}: {error}; --sampling-defaults openai ignores such values") from None
    if changed := _differences(recommended):
        log.info("sampling defaults of the model (sampling_defaults): %s", changed)
    return recommended


def _recommendation(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Returns the origin of the values, for error messages, and the values."""
    if source.format == "gguf":
        return source.name, EMBEDDED_RECOMMENDATION if source.name == EMBEDDED_MODEL else {}
    path = source.path / "generation_config.json"
    return str(path), read_json(path) if path.is_file() else {}


def _differences(params: SamplingParams) -> str:
    """`temperature 0.6, top_k 20`: the values that are not neutral."""
    usual = msgspec.structs.asdict(NEUTRAL_SAMPLING)
    given = msgspec.structs.asdict(params)
    return ", ".join(f"{name} {value:g}" for name, value in given.items() if value != usual[name])
