"""Tiny random checkpoints on disk, as Hugging Face writes them, with a byte-level tokenizer and a chat template.

Weights are drawn N(0, 1/fan_in) and embeddings N(0, 1): with transformers' own initialisation logits are nearly flat
and an argmax proves little. Embeddings are untied by default, since a model with tied random embeddings repeats one
token.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.configs.setting_types import LoadFormat
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.weights import stored_format
from pdserve.models.weights.format import Format
from pdserve.models.weights.gguf import hf_name
from tests.chat_template import CHAT_TEMPLATE

TinyArchitecture = Literal[
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "olmo2"
]

VOCAB_SIZE = 320
EOS_ID = 258
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258


def make_checkpoint(
    directory: Path,
    architecture: TinyArchitecture = "llama",
    *,
    seed: int = 0,
    shard_size: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a model of 3 layers, 4 query and 2 KV heads to `directory`; `overrides` are fields of its config.

    `shard_size` ("50KB") splits the weights over several files with an index.
    """
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    }[architecture]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if architecture in ("qwen3", "qwen3_moe"):
        fields["head_dim"] = 32
    if architecture == "gemma3_text":  # windows in two of three layers
        fields |= {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 24, "sliding_window_pattern": 3}
    if architecture == "gpt_oss":  # windows in the first and the third layer
        fields |= {"head_dim": 16, "sliding_window": 24, "num_local_experts": 8, "num_experts_per_tok": 4}
    if architecture == "mistral":
        fields["sliding_window"] = None
    if architecture in ("mixtral", "qwen3_moe"):
        fields |= {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = model_class(config_class(**(fields | overrides)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 + 0.1 * values
            elif name.endswith(("bias", "sinks")):
                values = 0.5 * values
            elif "embed_tokens" not in name:
                values = values / parameter.shape[-1] ** 0.5
            parameter.copy_(values)
    model = model.to(dtype)
    if shard_size is None:
        model.save_pretrained(directory)
    else:
        model.save_pretrained(directory, max_shard_size=shard_size)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json with one token per byte and three special tokens, and tokenizer_config.json."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def pack_experts(directory: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a gpt-oss checkpoint by random MXFP4 weights, the format of published checkpoints. Returns
    the tensors as transformers dequantises them.
    """
    generator = torch.Generator().manual_seed(11)
    tensors, expanded = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expanded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return expanded


def stored_in(source: ModelSource, load_format: LoadFormat) -> Format:
    """The format of a checkpoint that has one."""
    found = stored_format(source, load_format)
    assert found is not None
    return found


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers, the independent implementation that results are compared with."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


class QuickGgufReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
    """Reads a number without the six arrays that `gguf` makes for it, which take five seconds for a vocabulary."""

    def _get(self, offset: int, dtype: Any, count: int = 1, **_: object) -> Any:
        assert self.byte_order == "I"
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder("<"), int(count), offset)


@functools.cache
def read_smollm2() -> Any:
    """The GGUF file of the embedded model, opened by the `gguf` library."""
    return QuickGgufReader(locate_model("smollm2").path)


@functools.cache
def load_smollm2_reference() -> Any:
    """The embedded model in transformers; q and k are un-permuted by index here, not by reshapes as in the loader."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {}
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    for tensor in read_smollm2().tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = values.reshape(-1, 64, 576)[:, order].reshape(values.shape)
        weights[hf_name(tensor.name)] = torch.from_numpy(np.require(values, requirements="W"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were made on the meta device
    return model.eval()


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits after every token, [len, vocab] float32, from one uncached pass."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device=model.device), use_cache=False).logits
    return logits[0].float()


def reference_greedy(model: Any, token_ids: list[int], new_tokens: int) -> list[int]:
    """transformers' own greedy continuation, not stopped by EOS."""
    prompt = torch.tensor([token_ids], device=model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(token_ids) :].tolist()
    return tokens


def is_reference_greedy(model: Any, token_ids: list[int], out: list[int]) -> bool:
    """Whether `out` is transformers' greedy continuation: one uncached pass, faster than `reference_greedy`."""
    steps = reference_logits(model, token_ids + out[:-1])[len(token_ids) - 1 :]
    return steps.argmax(-1).tolist() == out


class GreedyTokens(Sequence[int]):
    """transformers' greedy continuation of a prompt, not stopped by EOS. `==` checks given tokens in one pass, which
    takes a tenth of the time of generating them. Other operations generate the tokens.
    """

    def __init__(self, model: Any, prompt: list[int], new_tokens: int) -> None:
        self._model = model
        self._prompt = list(prompt)
        self._new_tokens = new_tokens
        self._known: list[int] | None = None if new_tokens else []

    def __len__(self) -> int:
        return self._new_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if self._known is None and isinstance(index, slice) and not index.start and index.step is None:
            return GreedyTokens(self._model, self._prompt, len(range(self._new_tokens)[index]))
        return self._tokens()[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        given = list(other)
        if self._known is None and len(given) == self._new_tokens:
            self._known = given if is_reference_greedy(self._model, self._prompt, given) else None
        return given == self._tokens()

    def __repr__(self) -> str:
        return repr(self._tokens())

    def _tokens(self) -> list[int]:
        if self._known is None:
            self._known = reference_greedy(self._model, self._prompt, self._new_tokens)
        return self._known


DsaArchitecture = Literal["deepseek_v32", "glm_moe_dsa"]
LatentArchitecture = Literal["deepseek_v3"] | DsaArchitecture


def make_dsa_checkpoint(
    directory: Path,
    architecture: LatentArchitecture = "deepseek_v32",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a model with latent attention, of 4 layers, the first of them without experts; `overrides` are fields of
    its config. Models with sparse attention select 16 tokens. They have 16 indexer heads: with 4, one score in ten is
    0, and the selection among equal scores is arbitrary.
    """
    config_class, model_class = {
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
        "glm_moe_dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
    }[architecture]
    groups = 1 if architecture == "glm_moe_dsa" else 2
    indexer = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        **({} if architecture == "deepseek_v3" else indexer),
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": groups,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "dtype": dtype,
    }
    model = model_class(config_class(**(fields | overrides)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("norm.weight", "layernorm.weight")):
                values = 1 + 0.1 * values
            elif name.endswith(("bias", "sinks")):
                values = 0.1 * values
            elif "embed_tokens" not in name:
                values = values / tensor.shape[-1] ** 0.5
            tensor.copy_(values)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


# Matrices that DeepSeek's own checkpoints do not quantise.
_NOT_BLOCK_SCALED = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")


def quantise_checkpoint(directory: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Quantise the matrices of a checkpoint to block-scaled fp8, as DeepSeek stores them, and add a multi-token
    prediction layer to a model with latent attention. Returns the dequantised tensors of the model, computed block by
    block.
    """
    path = directory / "model.safetensors"
    stored, dequantised = {}, {}
    for name, tensor in load_file(path).items():
        stored[name] = dequantised[name] = tensor
        if tensor.ndim != 2 or name.endswith(_NOT_BLOCK_SCALED):
            continue
        fp8, value = torch.empty_like(tensor, dtype=torch.float8_e4m3fn), torch.empty_like(tensor)
        scales = torch.empty(-(-tensor.shape[0] // block[0]), -(-tensor.shape[1] // block[1]))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                rows = slice(row * block[0], (row + 1) * block[0])
                columns = slice(column * block[1], (column + 1) * block[1])
                scale = tensor[rows, columns].abs().max() / 448
                scales[row, column] = scale
                fp8[rows, columns] = (tensor[rows, columns] / scale).to(torch.float8_e4m3fn)
                value[rows, columns] = fp8[rows, columns].float() * scale
        stored[name], stored[f"{name}_scale_inv"], dequantised[name] = fp8, scales, value
    config = json.loads((directory / "config.json").read_text())
    if "kv_lora_rank" in config:
        stored[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(stored, path, metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    (directory / "config.json").write_text(json.dumps(config))
    return dequantised
