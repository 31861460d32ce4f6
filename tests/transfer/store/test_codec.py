"""Headers of values in the KV store, which detect damaged and wrong values."""

import pytest

from pdserve.transfer.store.codec import HEADER_BYTES, is_intact, seal, slot_bytes

PAYLOAD = bytes(range(200))


def sealed(key: str = "a") -> bytearray:
    slot = bytearray(slot_bytes(len(PAYLOAD)))
    slot[HEADER_BYTES : HEADER_BYTES + len(PAYLOAD)] = PAYLOAD
    assert seal(memoryview(slot), key, len(PAYLOAD)) == HEADER_BYTES + len(PAYLOAD)
    return slot


def test_sealed_value_is_intact() -> None:
    assert is_intact(memoryview(sealed()), "a", len(PAYLOAD))


@pytest.mark.parametrize("at", [0, 8, 16, 23, HEADER_BYTES, HEADER_BYTES + len(PAYLOAD) - 1])
def test_flipped_bit_is_detected(at: int) -> None:
    slot = sealed()
    slot[at] ^= 4
    assert not is_intact(memoryview(slot), "a", len(PAYLOAD))


def test_value_of_another_key_is_detected() -> None:
    assert not is_intact(memoryview(sealed("a")), "b", len(PAYLOAD))


def test_value_of_another_length_is_detected() -> None:
    assert not is_intact(memoryview(sealed()), "a", len(PAYLOAD) - 1)


def test_slot_sizes_are_multiples_of_64() -> None:
    assert [slot_bytes(size) for size in (0, 1, 64, 65)] == [64, 128, 128, 192]
