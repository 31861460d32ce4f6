"""The most likely tokens of a row, in an order that every device agrees on."""

import torch


def top_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits, [B, count] each, of the largest of each row of `logits` [B, V] (float32); ties by lower id.

    `torch.topk` leaves open which of two equal logits it takes. 16-bit models have many, so it gets distinct integers:
    the logit's bits, ordered as the logits are, above the id counted backwards.
    """
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats count backwards
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | backwards
    best = keys.topk(count, dim=-1).values if count < vocab_size else keys.sort(dim=-1, descending=True).values
    ids = vocab_size - 1 - (best & 0xFFFFFFFF)
    return ids, logits.gather(1, ids)
