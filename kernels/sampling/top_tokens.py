"""The most likely tokens of a row, in the same order on every device."""

import torch


def top_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits, [B, count] each, of the largest of each row of `logits` [B, V] (float32); ties by lower id.

    `torch.topk` does not define which of two equal logits it takes, and 16-bit models have many. So it gets distinct
    integers: the logit's bits, in the order of the logits, above the inverted id.
    """
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # turns -0.0 into 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats are in reverse order
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | backwards
    best = keys.topk(count, dim=-1).values if count < vocab_size else keys.sort(dim=-1, descending=True).values
    ids = vocab_size - 1 - (best & 0xFFFFFFFF)
    return ids, logits.gather(1, ids)
