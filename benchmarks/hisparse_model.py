"""The model of benchmarks/hisparse.py (DeepSeek-V3.2's attention), and how many requests a GPU memory budget holds."""

import argparse
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from pdserve.common.arithmetic import round_up
from pdserve.kernels.hisparse.slot_tables import buffer_pages, table_bytes
from pdserve.memory.hisparse.shared_pool import PoolOverlay

GIB = 1 << 30
PAGE = 64

DEEPSEEK_V32: Mapping[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 8192,
    "hidden_size": 7168,
    "intermediate_size": 33 * 2048,  # 32 of 256 experts and the shared one
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 8191,
}
TINY = {
    **DEEPSEEK_V32,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "index_topk": 128,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "eos_token_id": 511,
}


def longest_output(options: argparse.Namespace) -> int:
    return int(options.output * 1.5)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Requests that a GPU memory budget holds, with and without HiSparse. All bytes are of all layers."""

    latent_token: int
    index_token: int
    longest: int  # tokens of a request at most, in whole pages
    hot_rows: int
    layers: int
    budget: int

    @classmethod
    def of(cls, options: argparse.Namespace, model: Mapping[str, Any]) -> "Sizes":
        itemsize = 4 if options.device == "cpu" else 2
        latent = options.layers * (model["kv_lora_rank"] + model["qk_rope_head_dim"]) * itemsize
        fp8_index = options.index_dtype == "fp8_e4m3"
        index = options.layers * (model["index_head_dim"] + 4 if fp8_index else model["index_head_dim"] * itemsize)
        longest = round_up(options.context + longest_output(options), PAGE)
        return cls(latent, index, longest, options.hot_rows, options.layers, int(options.kv_memory_gib * GIB))

    @property
    def device_requests(self) -> int:
        return self.budget // self.device_request

    @property
    def device_request(self) -> int:
        return self.longest * (self.latent_token + self.index_token)

    @property
    def hisparse_request(self) -> int:
        """Index keys and hot buffer."""
        return self.longest * self.index_token + buffer_pages(self.hot_rows, PAGE) * PAGE * self.latent_token

    @property
    def hisparse_requests(self) -> int:
        """Requests whose index keys (in whole hot pages), hot buffers and tables fit the budget."""
        counts = itertools.takewhile(
            lambda count: self._overlay(count * self.longest).covered <= self._index_hot_pages(count),
            itertools.count(1),
        )
        return max(counts, default=0)

    @property
    def hisparse_tokens(self) -> int:
        """Tokens whose index keys fit the budget besides the hot buffers of running requests, and of requests whose KV
        waits in host memory for a buffer.
        """
        index_pages = self._index_hot_pages(self.hisparse_requests) * self.latent_token // self.index_token
        return index_pages * PAGE

    @property
    def resident_requests(self) -> int:
        """Requests that are fully resident: in the pages that the index leaves, and in its free pages."""
        most, each = self.hisparse_requests, self.longest // PAGE
        overlay = self._overlay(self.hisparse_tokens)
        own = self._hot_pages(most) - overlay.covered
        free = self.hisparse_tokens // PAGE
        counts = (
            count
            for count in range(most + 1)
            if count * each <= own + (free - count * each) // overlay.kv_pages * overlay.hot_pages
        )
        return max(counts)

    def _overlay(self, tokens: int) -> PoolOverlay:
        return PoolOverlay.of(tokens // PAGE, kv_page_bytes=self.index_token, hot_page_bytes=self.latent_token)

    def _index_hot_pages(self, requests: int) -> int:
        """Hot pages left for the index, besides the buffers and tables of this many requests."""
        return self._hot_pages(requests) - requests * buffer_pages(self.hot_rows, PAGE)

    def _hot_pages(self, requests: int) -> int:
        """Hot pages in the budget, besides the tables of this many requests."""
        return (self.budget - self.tables(requests)) // (PAGE * self.latent_token)

    def tables(self, requests: int) -> int:
        """Bytes of the tables, which the server keeps outside its hot pool; they count here."""
        return table_bytes(
            groups=self.layers,
            requests=requests,
            hot_rows=self.hot_rows,
            max_context=self.longest,
            page_size=PAGE,
        )

    def __str__(self) -> str:
        each = self.hisparse_request + self.tables(1)
        return (
            f"a budget of {self.budget / GIB:.2f} GiB for KV of {self.layers} layers, requests of up to {self.longest} "
            f"tokens of {self.latent_token} + {self.index_token} bytes:\n"
            f"  device    {self.device_request / 1e6:.1f} MB a request: {self.budget / self.device_request:.2f}, so "
            f"{self.device_requests} run\n"
            f"  hisparse  {each / 1e6:.1f} MB (index keys {self.longest * self.index_token / 1e6:.1f}, hot buffer of "
            f"{self.hot_rows} rows, tables): {self.budget / each:.2f}, so {self.hisparse_requests} run, with "
            f"{self.longest * self.latent_token / 1e6:.1f} MB each in host memory; up to {self.resident_requests} have "
            "that on the GPU as well"
        )
