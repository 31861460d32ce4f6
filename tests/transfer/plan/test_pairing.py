"""Which properties of two servers must be equal to pair; all others may differ."""

from typing import Literal

import msgspec
import pytest

from pdserve.transfer.plan.pairing import check_pair, share_device
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Hello, InstanceId, Pool, Rank, Welcome

Span = tuple[int, int]
K, V, LATENT, INDEXER = Plane("k", 256), Plane("v", 256), Plane("latent", 576), Plane("indexer", 256)
LAYOUT = KvLayout((K, V), 0, 8, 0, 4, 16, 100, "bfloat16")


def rank(number: int, *layouts: KvLayout, session: str | None = "10.0.0.1:1") -> Rank:
    return Rank(number, session, tuple(Pool(kv, 1 << 20, kv.size_bytes) for kv in layouts))


def part(layers: Span, heads: Span, layout: KvLayout = LAYOUT) -> KvLayout:
    return msgspec.structs.replace(
        layout, layer_start=layers[0], layer_end=layers[1], head_start=heads[0], head_end=heads[1]
    )


def sides(
    prefill: tuple[Rank, ...] = (rank(0, LAYOUT, session=None),), decode: tuple[Rank, ...] = (rank(0, LAYOUT),)
) -> tuple[Hello, Welcome]:
    return (
        Hello(2, InstanceId("decode"), "abc", "llama", decode),
        Welcome(2, InstanceId("prefill"), "abc", "llama", prefill),
    )


def refusal(prefill: tuple[Rank, ...] | None = None, decode: tuple[Rank, ...] | None = None) -> str:
    reason = check_pair(*sides(prefill or sides()[1].ranks, decode or sides()[0].ranks))
    assert reason is not None, "they paired"
    assert "\n" not in reason
    return reason


def test_equal_servers_pair() -> None:
    assert check_pair(*sides()) is None


@pytest.mark.parametrize(
    "decode",
    [
        pytest.param((part((0, 8), (0, 2)), part((0, 8), (2, 4))), id="tp2"),
        pytest.param((part((0, 8), (0, 1)), part((0, 8), (1, 4))), id="uneven heads"),
        pytest.param((part((0, 3), (0, 4)), part((3, 6), (0, 4)), part((6, 8), (0, 4))), id="pp3"),
        pytest.param(tuple(part((0, 8), (head, head + 1)) for head in range(4) for _ in range(2)), id="tp8, 4 heads"),
        pytest.param((msgspec.structs.replace(LAYOUT, page_size=64, num_pages=7),), id="pages"),
    ],
)
def test_different_shardings_of_the_same_kv_pair(decode: tuple[KvLayout, ...]) -> None:
    ranks = tuple(rank(number, kv) for number, kv in enumerate(decode))
    assert check_pair(*sides(decode=ranks)) is None
    assert check_pair(*sides(prefill=ranks)) is None


def test_host_pools_and_another_order_of_pools_pair() -> None:
    latent = KvLayout((LATENT,), 0, 8, 0, 1, 64, 100, "uint8")
    indexer = msgspec.structs.replace(latent, planes=(INDEXER,))
    host = Rank(
        0,
        "10.0.0.1:1",
        (Pool(indexer, 1, 1), Pool(latent, 1, 1, memory="host")),
    )
    assert check_pair(*sides((rank(0, latent, indexer), rank(1, latent, indexer)), (host,))) is None


def test_hot_pool_must_have_the_rows_of_a_pool_in_host_memory() -> None:
    latent = KvLayout((LATENT,), 0, 8, 0, 1, 64, 100, "uint8")
    hot = msgspec.structs.replace(latent, num_pages=7)
    cases: tuple[tuple[KvLayout, Literal["device", "host"], bool], ...] = (
        (hot, "host", True),
        (hot, "device", False),
        (msgspec.structs.replace(hot, page_size=32), "host", False),
        (msgspec.structs.replace(hot, layer_end=7), "host", False),
        (msgspec.structs.replace(hot, num_pages=0), "host", False),
    )
    for layout, memory, fits in cases:
        host = Rank(0, "10.0.0.1:1", (Pool(latent, 1, 1, memory=memory),), hot=Pool(layout, 1, 1))
        reason = check_pair(*sides((rank(0, latent),), (host,)))
        assert (reason is None) == fits
        assert fits or "no pool in host memory has such rows" in str(reason)


def test_pools_of_one_server_with_different_page_sizes_are_refused() -> None:
    latent = KvLayout((LATENT,), 0, 8, 0, 1, 64, 100, "uint8")
    indexer = msgspec.structs.replace(latent, planes=(INDEXER,), page_size=16)
    reason = check_pair(*sides((rank(0, latent, indexer),), (rank(0, latent, indexer),)))
    assert reason is not None
    assert "prefill rank 0 has 100 pages of 16 tokens" in reason
    assert "rank 0 has 100 of 64: all pools of a server share their pages" in reason


def test_different_protocol_or_model_is_refused_with_both_values() -> None:
    hello, welcome = sides()
    assert check_pair(msgspec.structs.replace(hello, protocol_version=1), welcome) == (
        "protocol version differs: prefill speaks 2, decode speaks 1"
    )
    reason = check_pair(msgspec.structs.replace(hello, model_fingerprint="xyz", model_name="qwen"), welcome)
    assert reason == "models differ: prefill serves llama (abc), decode serves qwen (xyz)"


def with_checkpoints(introduction: Hello | Welcome, *checkpoints: str) -> tuple[Rank, ...]:
    first = introduction.ranks[0]
    return tuple(msgspec.structs.replace(first, rank=n, checkpoint=name) for n, name in enumerate(checkpoints))


@pytest.mark.parametrize(
    ("prefill", "decode", "old", "differ"),
    [
        pytest.param("new", "new", "other", "", id="equal, whatever older servers compare"),
        pytest.param("new", "newer", "abc", "llama (new), decode serves llama (newer)", id="different"),
        pytest.param("", "new", "abc", "", id="older prefill"),
        pytest.param("new", "", "abc", "", id="older decode"),
        pytest.param("new", "", "other", "llama (abc), decode serves llama (other)", id="older decode, different"),
    ],
)
def test_the_fingerprint_that_both_sides_know_decides(prefill: str, decode: str, old: str, differ: str) -> None:
    hello, welcome = sides()
    hello = msgspec.structs.replace(hello, ranks=with_checkpoints(hello, decode), model_fingerprint=old)
    welcome = msgspec.structs.replace(welcome, ranks=with_checkpoints(welcome, prefill))
    assert check_pair(hello, welcome) == (f"models differ: prefill serves {differ}" if differ else None)


@pytest.mark.parametrize(
    ("decode", "both_values"),
    [
        ({"planes": (K, Plane("v", 128))}, ("prefill has k of 256 B + v of 256 B", "decode has k of 256 B + v of 128")),
        ({"planes": (LATENT,)}, ("prefill has k of 256 B + v of 256 B", "decode has latent of 576 B")),
        ({"dtype": "float16"}, ("prefill has k of 256 B + v of 256 B (bfloat16)", "v of 256 B (float16)")),
        ({"layer_end": 7}, ("layers of k+v differ", "prefill holds [0, 8)", "decode holds [0, 7)")),
        ({"head_end": 8}, ("KV heads of k+v differ", "prefill holds [0, 4)", "decode holds [0, 8)")),
    ],
)
def test_different_kv_is_refused_with_both_values(decode: dict[str, object], both_values: tuple[str, ...]) -> None:
    reason = refusal(decode=(rank(0, msgspec.structs.replace(LAYOUT, **decode)),))
    for value in both_values:
        assert value in reason


def test_a_pool_that_only_one_side_has_is_refused() -> None:
    latent = KvLayout((LATENT,), 0, 8, 0, 1, 64, 100, "uint8")
    both = rank(0, latent, msgspec.structs.replace(latent, planes=(INDEXER,)))
    reason = refusal(prefill=(rank(0, latent),), decode=(both,))
    assert reason == (
        "KV pools differ: prefill has latent of 576 B (uint8), decode has latent of 576 B (uint8), "
        "indexer of 256 B (uint8)"
    )


def test_indexer_keys_of_another_type_are_refused_with_both_types() -> None:
    latent = KvLayout((LATENT,), 0, 8, 0, 1, 64, 100, "bfloat16")
    plain = msgspec.structs.replace(latent, planes=(INDEXER,))
    planes = Plane("indexer", 128), Plane("indexer_scale", 4)
    fp8 = msgspec.structs.replace(latent, planes=planes, dtype="float8_e4m3fn")
    assert refusal(prefill=(rank(0, latent, plain),), decode=(rank(0, latent, fp8),)) == (
        "KV pools differ: prefill has latent of 576 B (bfloat16), indexer of 256 B (bfloat16), decode has latent of "
        "576 B (bfloat16), indexer of 128 B + indexer_scale of 4 B (float8_e4m3fn)"
    )
    assert check_pair(*sides((rank(0, latent, fp8),), (rank(0, latent, fp8),))) is None


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_missing_layers_or_heads_are_refused(side: str) -> None:
    holed = (rank(0, part((0, 8), (0, 2))), rank(1, part((0, 5), (2, 4))))
    reason = refusal(prefill=holed) if side == "prefill" else refusal(decode=holed)
    assert reason.startswith(
        f"no rank of {side} holds layer 5, head 2 of k+v; both sides must hold all of layers [0, 8)"
    )


def test_a_decode_rank_without_a_session_is_refused() -> None:
    halves = (rank(0, part((0, 8), (0, 2))), rank(1, part((0, 8), (2, 4)), session=None))
    assert refusal(decode=halves) == "decode rank 1 of 2 announces no session for prefill to write to"
    assert check_pair(*sides(prefill=halves)) is None


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ((rank(1, LAYOUT),), "decode announces ranks [1]; they must be numbered from 0 without gaps"),
        ((rank(0, LAYOUT), rank(0, LAYOUT)), "decode announces ranks [0, 0]"),
        ((rank(0),), "decode rank 0 announces KV pools none; each rank has one of each kind"),
        ((rank(0, LAYOUT, LAYOUT),), "decode rank 0 announces KV pools k of 256 B"),
        (
            (rank(0, msgspec.structs.replace(LAYOUT, page_size=0)),),
            "impossible KV pool: layers [0, 8), heads [0, 4), 100",
        ),
        ((rank(0, part((3, 3), (0, 4))),), "impossible KV pool: layers [3, 3)"),
        (
            (rank(0, part((0, 8), (0, 2))), rank(1, msgspec.structs.replace(part((0, 8), (2, 4)), dtype="float16"))),
            "KV pools differ inside decode: rank 0 has k of 256 B + v of 256 B (bfloat16), rank 1 has",
        ),
    ],
)
def test_inconsistent_server_is_refused(ranks: tuple[Rank, ...], reason: str) -> None:
    assert reason in refusal(decode=ranks)


def test_a_side_without_ranks_is_refused() -> None:
    hello, welcome = sides()
    assert "decode announces ranks []" in str(check_pair(msgspec.structs.replace(hello, ranks=()), welcome))


@pytest.mark.parametrize(
    ("prefill", "decode", "shared"),
    [
        ([("m", (0, 1), 2)], [("m", (0, 1), 2)], True),
        ([("m", (0, 1), 1)], [("m", (0, 1), 1)], False),  # a core for each thread
        ([("m", (0, 1), 2)], [("m", (2, 3), 2)], False),
        ([("m", (0, 1), 2)], [("m", (1, 2), 2)], True),
        ([("m", (0, 1), 2)], [("n", (0, 1), 2)], False),
        ([("m", (0, 1), 1), ("n", (0, 1), 1)], [("n", (0, 1), 2)], True),
        ([("m", (), 0)], [("m", (), 0)], False),  # GPUs
        ([("m", (), 0)], [("m", (0, 1), 2)], False),
        ([("", (), 0)], [("m", (0, 1), 2)], False),
    ],
)
def test_servers_share_the_cpu_if_they_have_more_threads_than_cores(
    prefill: list[tuple[str, Span, int]], decode: list[tuple[str, Span, int]], shared: bool
) -> None:
    def ranks(found: list[tuple[str, Span, int]]) -> list[Rank]:
        return [
            Rank(number, None, (), machine, cpu_cores=cores, cpu_threads=threads)
            for number, (machine, cores, threads) in enumerate(found)
        ]

    assert share_device(ranks(decode), ranks(prefill)) is shared


@pytest.mark.parametrize(
    ("prefill", "decode", "shared"),
    [
        (["a"], ["a"], True),
        (["a", "b"], ["c", "b"], True),
        (["a"], ["b"], False),
        ([""], [""], False),  # older servers
        (["a"], [""], False),
    ],
)
def test_servers_share_a_gpu_by_its_uuid(prefill: list[str], decode: list[str], shared: bool) -> None:
    def ranks(gpus: list[str]) -> list[Rank]:
        return [Rank(number, None, (), "m", gpu=gpu) for number, gpu in enumerate(gpus)]

    assert share_device(ranks(decode), ranks(prefill)) is shared
