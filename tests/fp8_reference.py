"""transformers with a KV cache whose values are rounded to float8_e4m3fn: the independent reference for fp8 KV."""

from typing import Any

import torch
from transformers import DynamicCache


class RoundingCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values come back rounded to fp8, those of the newest tokens too."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = (part.clamp(-448, 448).to(torch.float8_e4m3fn).to(part.dtype) for part in (key_states, value_states))
        key, value = super().update(*rounded, *args, **kwargs)
        return key, value


def rounded_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits after every token, [len, vocab] float32."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), past_key_values=RoundingCache()).logits
    return logits[0].float()


def rounded_greedy(model: Any, token_ids: list[int], new_tokens: int) -> list[int]:
    """transformers' own greedy continuation with this cache, not stopped by EOS."""
    prompt = torch.tensor([token_ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=RoundingCache(),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(token_ids) :].tolist()
    return tokens
