"""Decides whether the layers of a decoder can be computed in one call (kernels/layer_stack/)."""

import torch

from ...kernels.layer_stack.layer_stack import Layer, LayerStack
from ..layers.moe import MlpParameters
from .dense_parameters import DecoderParameters, LayerParameters


def make_layer_stack(parameters: DecoderParameters, kv_dtype: torch.dtype, scale: float) -> LayerStack | None:
    """The layers for decode steps on the CPU, if its kernel reads all their weights. None if a weight is
    not, and for architectures with windows, sinks, mixtures of experts, GELU or post-norms. `scale` is that of
    attention scores.
    """
    config = parameters.config
    if config.window is not None or config.sinks or config.gelu or config.post_norms or kv_dtype != torch.float32:
        return None
    layers = [layer for each in parameters.layers if (layer := _layer(each)) is not None]
    if len(layers) < len(parameters.layers) or not LayerStack.fits(layers):
        return None
    return LayerStack(layers, eps=config.norm_eps, scale=scale)


def _layer(layer: LayerParameters) -> Layer | None:
    mlp = layer.mlp
    if (
        layer.input_norm is None
        or layer.mlp_norm is None
        or layer.step is not None
        or not isinstance(mlp, MlpParameters)
    ):
        return None
    qkv, o = layer.qkv.in_stack(layer.qkv_bias), layer.o.in_stack(layer.o_bias)
    gate_up, down = mlp.gate_up.in_stack(mlp.gate_up_bias), mlp.down.in_stack(mlp.down_bias)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    return Layer(layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, qkv, o, gate_up, down)
