"""latent_write and rotate_queries against float64, one coordinate pair at a time; nothing else in a pool changes."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.dsa.key_write import KeyWrite
from pdserve.kernels.dsa.latent_write import latent_write
from pdserve.kernels.dsa.rotate_queries import rotate_queries
from tests.kernels.places import each_of

PAGES, LAYERS, LAYER, EPS = 8, 3, 1, 1e-3
Where = tuple[Impl, torch.device, torch.dtype]

where = each_of(
    ("auto", "cpu", torch.float32),
    ("reference", "cpu", torch.bfloat16),
    ("triton", "cpu", torch.float32),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
)


class Draw:
    """Random tensors in the dtype and on the device of a case."""

    def __init__(self, seed: int, where: Where) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        _, self._device, self._dtype = where

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def angles(self, tokens: int, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = 10 * torch.rand(tokens, rope_dim // 2, generator=self._generator)
        cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(self._device, self._dtype)
        signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(self._device, self._dtype)
        return cos, signed_sin

    def rows(self, tokens: int, page_size: int) -> torch.Tensor:
        """Distinct rows; the second token and the last are padding."""
        rows = torch.randperm(PAGES * page_size, generator=self._generator)[:tokens].int()
        rows[[1, -1]] = -1
        return rows.to(self._device)


def exact_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def exact_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() + bias.double()


def exact_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """RoPE of x [T, P], one coordinate pair at a time."""
    x, half = x.double(), x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        first, second = (x[:, 2 * i], x[:, 2 * i + 1]) if interleaved else (x[:, i], x[:, half + i])
        c, s = cos[:, i].double(), signed_sin[:, half + i].double()
        out[:, i], out[:, half + i] = first * c - second * s, second * c + first * s
    return out


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # in 16 bits: norm and weight, the products and the sum are rounded; values are of order 1, up to about 10
    tolerance = 1e-5 if found.dtype == torch.float32 else 2**-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance / 4, atol=tolerance)


def check_pool(pool: torch.Tensor, before: torch.Tensor, rows: torch.Tensor, expected: torch.Tensor) -> None:
    """The valid rows of one layer are as expected, everything else is unchanged."""
    page_size, real = pool.shape[2], rows >= 0
    chosen = rows[real].long()
    written = pool[chosen // page_size, LAYER, chosen % page_size]
    close(written, expected[real])
    before[chosen // page_size, LAYER, chosen % page_size] = written
    assert pool.equal(before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("q_rank", "kv_rank", "rope_dim", "key_dim", "page_size"),
    [(32, 48, 16, 32, 4), (24, 40, 12, 12, 1), (1536, 512, 64, 128, 64), (48, 64, 16, None, 16)],
)
def test_rows_keys_and_compressed_queries_equal_float64(
    q_rank: int, kv_rank: int, rope_dim: int, key_dim: int | None, page_size: int, interleaved: bool, where: Where
) -> None:
    impl, _, _ = where
    draw, tokens = Draw(q_rank + page_size, where), 6
    x = draw(tokens, q_rank + kv_rank + rope_dim + (key_dim or 0))
    q_norm, kv_norm = draw(q_rank), draw(kv_rank)
    cos, signed_sin = draw.angles(tokens, rope_dim)
    pool, rows = draw(PAGES, LAYERS, page_size, kv_rank + rope_dim), draw.rows(tokens, page_size)
    pool_before = pool.clone()
    key = None
    if key_dim is not None:
        keys = draw(PAGES, LAYERS, page_size, key_dim)
        keys_before = keys.clone()
        key = KeyWrite(draw(key_dim), draw(key_dim), keys[:, LAYER], draw.rows(tokens, page_size), interleaved)

    compressed = latent_write(x, q_norm, kv_norm, cos, signed_sin, pool[:, LAYER], rows, eps=EPS, key=key, impl=impl)

    query, latent, rope_part, plain_key = torch.split_with_sizes(x, [q_rank, kv_rank, rope_dim, key_dim or 0], dim=1)
    assert compressed.is_contiguous()
    close(compressed, exact_rms(query, q_norm))
    rotated_part = exact_rope(rope_part, cos, signed_sin, interleaved=True)
    check_pool(pool, pool_before, rows, torch.cat((exact_rms(latent, kv_norm), rotated_part), dim=1))
    if key is not None:
        normed = exact_layer_norm(plain_key, key.norm, key.bias)
        rotated_part = exact_rope(normed[:, :rope_dim], cos, signed_sin, interleaved=interleaved)
        check_pool(keys, keys_before, key.rows, torch.cat((rotated_part, normed[:, rope_dim:]), dim=1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "index_heads", "index_dim", "rope_dim", "kv_rank"),
    [(4, 40, 16, 32, 16, 48), (3, 20, 5, 12, 12, 8), (17, 24, 0, 16, 8, 32), (128, 192, 64, 128, 64, 512)],
)
def test_rotated_queries_equal_float64(
    heads: int,
    head_dim: int,
    index_heads: int,
    index_dim: int,
    rope_dim: int,
    kv_rank: int,
    interleaved: bool,
    where: Where,
) -> None:
    impl, _, _ = where
    draw, tokens = Draw(heads + head_dim, where), 3
    x = draw(tokens, heads * head_dim + index_heads * index_dim)
    cos, signed_sin = draw.angles(tokens, rope_dim)
    query = draw(tokens, heads, kv_rank + rope_dim)
    before = query.clone()

    rotated = rotate_queries(
        x, cos, signed_sin, query, head_dim=head_dim, index_dim=index_dim, interleaved=interleaved, impl=impl
    )

    assert query[:, :, :kv_rank].equal(before[:, :, :kv_rank])
    own = x[:, : heads * head_dim].view(tokens, heads, head_dim)
    for head in range(heads):
        rotated_part = exact_rope(own[:, head, -rope_dim:], cos, signed_sin, interleaved=True)
        close(query[:, head, kv_rank:], rotated_part)
    if index_heads == 0:
        assert rotated is None
        return
    assert rotated is not None
    index_query, scales = rotated
    assert scales is None
    assert index_query.is_contiguous()
    theirs = x[:, heads * head_dim :].view(tokens, index_heads, index_dim)
    assert index_query[:, :, rope_dim:].equal(theirs[:, :, rope_dim:])
    for head in range(index_heads):
        rotated_part = exact_rope(theirs[:, head, :rope_dim], cos, signed_sin, interleaved=interleaved)
        close(index_query[:, head, :rope_dim], rotated_part)


def test_invalid_arguments_are_refused() -> None:
    pages, angle, row = torch.zeros(2, 4, 12), torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)
    norms = torch.zeros(6), torch.zeros(8)
    with pytest.raises(ValueError, match="x has rows of 18"):
        latent_write(torch.zeros(1, 19), *norms, angle, angle, pages, row, eps=0.0)
    with pytest.raises(ValueError, match="rows of 12 elements"):
        latent_write(torch.zeros(1, 18), *norms, angle, angle, pages[..., 1:], row, eps=0.0)
    with pytest.raises(ValueError, match="not one int32"):
        latent_write(torch.zeros(1, 18), *norms, angle, angle, pages, row.long(), eps=0.0)
    with pytest.raises(ValueError, match="2 heads of 10 and some of 8"):
        rotate_queries(
            torch.zeros(1, 25), angle, angle, torch.zeros(1, 2, 12), head_dim=10, index_dim=8, interleaved=True
        )
