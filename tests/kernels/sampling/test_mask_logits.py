"""mask_logits against a loop over bits."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.sampling.mask_logits import mask_logits
from tests.kernels.places import PLACES, each_of
from tests.kernels.poison import poisoned

where = each_of(*PLACES, ("triton", "cpu"))


@pytest.mark.parametrize(("rows", "vocabulary", "masks"), [(1, 32, 1), (3, 4097, 2), (5, 70, 5), (2, 9000, 1)])
def test_equals_a_loop_over_bits(rows: int, vocabulary: int, masks: int, where: tuple[Impl, torch.device]) -> None:
    impl, device = where
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator)
    words = torch.randint(-(2**31), 2**31 - 1, (masks, -(-vocabulary // 32)), generator=generator, dtype=torch.int32)
    slots = torch.randint(-1, masks, (rows,), generator=generator, dtype=torch.int32)
    expected = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        for token in range(vocabulary):
            if slot >= 0 and not (int(words[slot, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    before = logits.to(device)
    with poisoned(impl):
        out = mask_logits(before, slots.to(device), words.to(device), impl=impl)
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(before.cpu(), logits), "the raw logits changed"


def test_rows_of_a_wider_tensor_are_read_with_their_stride(where: tuple[Impl, torch.device]) -> None:
    impl, device = where
    logits = torch.arange(200.0, device=device).view(2, 100)[:, :64]
    mask = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    out = mask_logits(logits, torch.zeros(2, dtype=torch.int32, device=device), mask, impl=impl)
    assert out.isfinite().nonzero().tolist() == [[0, 0], [0, 33], [1, 0], [1, 33]]
    assert out[1, 33] == 133.0


def test_invalid_arguments_are_refused() -> None:
    logits, slots, mask = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="int32"):
        mask_logits(logits, slots.long(), mask)
    with pytest.raises(ValueError, match="do not fit"):
        mask_logits(logits, slots, mask[:, :1])
