"""Which weights and which decoder each family has."""

from ..config.model import ModelConfig
from .dense import Decoder
from .dense_parameters import DecoderParameters
from .latent_parameters import LatentParameters
from .olmo2 import Olmo2Decoder, Olmo2Parameters

DENSE: dict[str, tuple[type[DecoderParameters], type[Decoder]]] = {"olmo2": (Olmo2Parameters, Olmo2Decoder)}
"""Families with full or windowed attention that are not `Decoder` itself."""


def parameters_of(config: ModelConfig) -> type[DecoderParameters] | type[LatentParameters]:
    if config.mla is not None:
        return LatentParameters
    return dense_family(config)[0]


def dense_family(config: ModelConfig) -> tuple[type[DecoderParameters], type[Decoder]]:
    return DENSE.get(config.architecture, (DecoderParameters, Decoder))
