"""The size of the staging ring, and its memory."""

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.configs.setting_types import StagingSetting
from pdserve.memory.ring_memory import RingMemory, may_stage, ring_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("ring_mib", "token_bytes", "expected"),
    [
        (None, 2 * KIB, 16 * MIB),
        (None, 128 * KIB, 128 * MIB),
        (None, 17, 136 * KIB),
        (0.031, 17, 32 * KIB),
        (0.03, 2 * KIB, 32 * KIB),
        (512, 2 * KIB, 512 * MIB),
    ],
)
def test_ring_size_is_the_setting_or_twice_the_kv_of_4096_tokens_up_to_128_mib(
    ring_mib: float | None, token_bytes: int, expected: int
) -> None:
    assert ring_bytes(DecodeConfig(staging_ring_mib=ring_mib), token_bytes) == expected


def test_ring_smaller_than_one_token_is_refused() -> None:
    assert ring_bytes(DecodeConfig(staging_ring_mib=0.001), 4 * KIB) == 4 * KIB
    with pytest.raises(StartupError, match=r"staging_ring_mib = 0\.001 is less than one token, which takes 5000 bytes"):
        ring_bytes(DecodeConfig(staging_ring_mib=0.001), 5000)


@pytest.mark.parametrize(
    ("staging", "kv_heads", "expected"),
    [("auto", 8, True), ("auto", 2, True), ("auto", 1, False), ("on", 1, True), ("off", 8, False)],
)
def test_memory_is_reserved_for_staging_only_if_heads_can_be_sliced(
    staging: StagingSetting, kv_heads: int, expected: bool
) -> None:
    assert may_stage(PrefillConfig(staging=staging), kv_heads) is expected
    assert may_stage(DecodeConfig(staging=staging), kv_heads) is expected


def test_cpu_ring_is_plain_memory() -> None:
    ring = RingMemory(8 * KIB, torch.device("cpu"))
    assert (ring.on_gpu, ring.size_bytes, len(ring.data)) == (False, 8 * KIB, 8 * KIB)
    assert ring.base_address == ring.data.data_ptr()


@pytest.mark.gpu
def test_gpu_ring_is_an_allocation_of_its_own() -> None:
    device = torch.device("cuda", 0)
    half_used = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    del half_used  # leaves a cached block, which a plain tensor would be allocated from
    small = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    ring = RingMemory(32 * MIB, device)
    starts = {segment["address"] for segment in torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]
    assert ring.base_address in starts
    assert len(small) == 4 * MIB
