"""Log-probabilities of tokens under the model itself: log-softmax of its raw logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...common.sampling import TokenLogprob
from ...kernels.sampling.top_tokens import top_tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of N tokens, and the `top` most likely alternatives of each; still on the device."""

    tokens: torch.Tensor  # [N] int64
    logprobs: torch.Tensor  # [N] float32
    top_ids: torch.Tensor  # [N, top] int64, best first, ties by lower id
    top_logprobs: torch.Tensor  # [N, top] float32

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors to read back, in the order of `entries`."""
        return self.tokens, self.logprobs, self.top_ids, self.top_logprobs


@torch.inference_mode()
def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Logprobs:
    """The log-probability of tokens[i] under logits[i], for logits [N, V] in float32."""
    top = min(top, logits.shape[-1])
    norms = logits.logsumexp(dim=-1, keepdim=True)
    logprobs = logits.gather(1, tokens.unsqueeze(1)) - norms
    if top == 0:
        return Logprobs(tokens, logprobs.squeeze(1), tokens.new_empty(0), logits.new_empty(0))
    top_ids, top_logits = top_tokens(logits, top)
    return Logprobs(tokens, logprobs.squeeze(1), top_ids, top_logits - norms)


def entries(values: Sequence[Sequence[float]], tops: Sequence[int]) -> list[TokenLogprob]:
    """The values of a `Logprobs` that was read back, token by token, each with its own number of alternatives."""
    tokens, logprobs, top_ids, top_logprobs = values
    width = len(top_ids) // len(tokens) if tokens else 0
    return [
        TokenLogprob(
            int(token),
            logprob,
            tuple(
                (int(top_ids[at]), top_logprobs[at])
                for at in range(index * width, index * width + min(tops[index], width))
            ),
        )
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]
