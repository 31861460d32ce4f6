"""Sampling defaults that a checkpoint recommends in `generation_config.json`."""

import logging

import msgspec

from ...configs.errors import StartupError
from ...configs.sampling import NEUTRAL_SAMPLING, SamplingParams
from ...models.formats.json_fields import read_json
from ...models.loading.catalog import ModelSource
from .common.fields import FieldError, validate
from .common.sampling_fields import DistributionFields

log = logging.getLogger("pdserve.frontend")


def read_default_sampling(source: ModelSource) -> SamplingParams:
    """The recommended values, as SGLang and vLLM read them; neutral values for everything else.

    Raises StartupError for a value that is invalid in requests, too. GGUF files recommend nothing.
    """
    path = source.path / "generation_config.json"
    if source.format == "gguf" or not path.is_file():
        return NEUTRAL_SAMPLING
    try:
        recommended = validate(DistributionFields, read_json(path)).distribution(
            NEUTRAL_SAMPLING, source.config.vocab_size
        )
    except FieldError as error:
        raise StartupError(f"{path}: {error}; --sampling-defaults openai ignores such values") from None
    if changed := _differences(recommended):
        log.info("sampling defaults of the model (sampling_defaults): %s", changed)
    return recommended


def _differences(params: SamplingParams) -> str:
    """`temperature 0.6, top_k 20`: the values that are not neutral."""
    usual = msgspec.structs.asdict(NEUTRAL_SAMPLING)
    given = msgspec.structs.asdict(params)
    return ", ".join(f"{name} {value:g}" for name, value in given.items() if value != usual[name])
