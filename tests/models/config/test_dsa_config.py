"""config.json of sparse models: supported and refused fields, and the split of layers into stages."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig
from pdserve.memory.auto_settings import KvShare
from pdserve.memory.hisparse.sizing import hisparse_size
from pdserve.memory.sizing import GIB
from pdserve.models.config.dsa import DsaConfig
from pdserve.models.config.model import ModelConfig
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.fingerprint import fingerprints
from pdserve.models.registry import read_config_file
from pdserve.models.weights.schemes import Fp8Scheme
from tests.checkpoints import make_dsa_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sparse")
    make_dsa_checkpoint(directory / "deepseek_v32", "deepseek_v32")
    make_dsa_checkpoint(directory / "glm_moe_dsa", "glm_moe_dsa")
    return directory


def read(checkpoints: Path, tmp_path: Path, architecture: str, **changes: Any) -> ModelConfig:
    """The config of a checkpoint with some fields set; None removes one."""
    copy = Path(shutil.copytree(checkpoints / architecture, tmp_path / "copy", dirs_exist_ok=True))
    config = json.loads((checkpoints / architecture / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return locate_model(str(copy)).config


def dsa(config: ModelConfig) -> DsaConfig:
    assert config.dsa is not None
    return config.dsa


def test_sparse_model_config_is_read(checkpoints: Path) -> None:
    config = read_config_file(checkpoints / "deepseek_v32" / "config.json")
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("deepseek_v32", 4, 4, 1)
    assert (config.head_dim, config.rotary_dim) == (64, 16)
    sparse = dsa(config)
    assert (sparse.index_heads, sparse.index_dim, sparse.index_topk) == (16, 32, 16)
    assert config.mixed == (False, True, True, True)
    assert sparse.indexed == (True, True, True, True)
    assert config.moe is not None
    assert (config.moe.num_groups, config.moe.scale, config.scheme) == (2, 2.5, None)


def test_released_deepseek_config_is_read(checkpoints: Path, tmp_path: Path) -> None:
    config = read(
        checkpoints,
        tmp_path,
        "deepseek_v32",
        mlp_layer_types=None,
        layer_types=None,
        rope_parameters=None,
        rope_theta=10000,
        rope_scaling={"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
        | {"beta_slow": 1, "original_max_position_embeddings": 4096},
        max_position_embeddings=163840,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        dtype=None,
        torch_dtype="bfloat16",
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        num_nextn_predict_layers=1,
    )
    assert (config.rope.kind, config.rope.factor, config.context_length) == ("yarn", 40.0, 163840)
    assert (config.dtype, config.scheme, config.mixed) == (
        "bfloat16",
        Fp8Scheme((128, 128)),
        (False, True, True, True),
    )


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, "FSFS"),
        ({"indexer_types": None}, "FFFF"),
        ({"indexer_types": None, "index_topk_freq": 3, "num_hidden_layers": 7}, "FFSSFSS"),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFS"),
        ({"indexer_types": None, "index_topk_pattern": "FFSS"}, "FFSS"),
    ],
    ids=str,
)
def test_layers_that_share_a_selection_are_read(
    changes: dict[str, Any], indexed: str, checkpoints: Path, tmp_path: Path
) -> None:
    config = read(checkpoints, tmp_path, "glm_moe_dsa", mlp_layer_types=None, layer_types=None, **changes)
    assert dsa(config).indexed == tuple(kind == "F" for kind in indexed)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek_v32", {"attention_bias": True}, "attention_bias True is not supported; supported is False"),
        ("deepseek_v32", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("deepseek_v32", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported; supported is 4"),
        ("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v32", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek_v32", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 4}, "layer_types has full_attention"),
        ("deepseek_v32", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ("deepseek_v32", {"n_group": 3}, "n_group = 3 groups of n_routed_experts = 8: groups must be equal and of two"),
        ("deepseek_v32", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 in topk_group = 1"),
        ("deepseek_v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must say 'dense' or 'sparse' for each of 4"),
        ("deepseek_v32", {"index_head_dim": 8}, "qk_rope_head_dim = 16 must be at most index_head_dim = 8"),
        ("deepseek_v32", {"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq"),
        ("deepseek_v32", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, r"\(fp8, fmt e5m2\)"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full"]}, "the first one 'full'"),
        ("glm_moe_dsa", {"indexer_types": ["full", "half", "full", "full"]}, "indexer_types must say 'full' or"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": -1}, "an integer of at least 0, got -1"),
    ],
    ids=str,
)
def test_unsupported_config_is_refused(
    architecture: str, changes: dict[str, Any], message: str, checkpoints: Path, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message):
        read(checkpoints, tmp_path, architecture, **changes)


def test_fingerprint_covers_the_selection(checkpoints: Path, tmp_path: Path) -> None:
    names = set()
    for number, topk in enumerate((16, 17)):
        target = tmp_path / str(number)
        target.mkdir()
        read(checkpoints, target, "glm_moe_dsa", index_topk=topk)
        names.add(fingerprints(locate_model(str(target / "copy"))).model)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("pattern", "stages", "starts"),
    [
        ("FFFF", 2, [0, 2]),
        ("FFFFF", 2, [0, 3]),
        ("FSSSF", 2, [0, 4]),
        ("FFSSS", 2, [0, 1]),
        ("FFSSFSSFSS", 3, [0, 4, 7]),
        ("FFFSSSSSSS", 3, [0, 1, 2]),
        ("FSSSSSSFFF", 4, [0, 7, 8, 9]),
    ],
)
def test_layer_and_its_selection_are_on_one_stage(
    pattern: str, stages: int, starts: list[int], checkpoints: Path, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": len(pattern), "layer_types": None, "mlp_layer_types": None, "indexer_types": None}
    config = read(checkpoints, tmp_path, "glm_moe_dsa", index_topk_pattern=pattern, **changes)
    cut = [config.stage_layers(Shard(stage=stage, stages=stages)) for stage in range(stages)]
    assert [layers.start for layers in cut] == starts
    assert all(pattern[layers.start] == "F" for layers in cut)
    assert all(first.stop == second.start for first, second in pairwise(cut))
    assert cut[-1].stop == len(pattern)
    for layers, stage in zip(cut, range(stages), strict=True):
        shard = Shard(tp_rank=1, tp_size=2, stage=stage, stages=stages)
        parameters = LatentParameters.allocate(config, shard, device=torch.device("cpu"), dtype=torch.float32)
        latent, keys = DsaDecoder(parameters).make_cache(1, 4).pools
        assert (latent.layers, latent.heads) == (layers, range(1))
        before = pattern[: layers.start].count("F")
        assert (keys.layers, keys.heads) == (range(before, pattern[: layers.stop].count("F")), range(1))
    with pytest.raises(StartupError, match=rf"share {pattern.count('F')} indexers: give at most {pattern.count('F')}"):
        config.stage_layers(Shard(stages=pattern.count("F") + 1))


def test_glm_5_2_stores_keys_of_its_21_indexers_only(checkpoints: Path, tmp_path: Path) -> None:
    """Half of the 40 GiB is for keys. If all layers had keys, that would be enough for 32 requests."""
    shape = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    row = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "index_head_dim": 128}
    of_four_layers = dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types"))
    config = read(checkpoints, tmp_path, "glm_moe_dsa", **shape, **row, **of_four_layers)
    assert [layer for layer, indexed in enumerate(dsa(config).indexed) if indexed] == [0, 1, *range(2, 78, 4)]
    parameters = LatentParameters.allocate(config, device=torch.device("meta"), dtype=torch.bfloat16)
    decoder = DsaDecoder(parameters)
    latent, keys = (pool.size_bytes for pool in decoder.make_cache(1, 1).pools)
    assert (latent, keys) == (78 * 576 * 2, 21 * 128 * 2)
    assert decoder.kv_token_bytes == 95_232

    def requests(indexer_token_bytes: int) -> int:
        """How many requests of 32,768 tokens have room for their keys."""
        size = hisparse_size(
            DecodeConfig(page_size=64, kv_memory_gib=40, host_memory_gib=1000),
            latent_token_bytes=latent,
            indexer_token_bytes=indexer_token_bytes,
            hot_rows=4096,
            index_groups=21,
            context_length=32768,
            slots=128,
            share=KvShare(0.5),
            host_bytes=1000 * GIB,
            device_bytes=60 * GIB,
        )
        return size.num_pages * 64 // 32768

    assert (requests(78 * 128 * 2), requests(keys)) == (32, 121)
    _, fp8_keys = DsaDecoder(parameters, fp8_index=True).make_cache(1, 1).pools
    assert fp8_keys.size_bytes == 21 * 132
    assert requests(fp8_keys.size_bytes) == 130  # more than the 128 that may run
