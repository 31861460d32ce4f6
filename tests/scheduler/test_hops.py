"""How many files and classes a request passes in the decode scheduler and its memory: few enough to read them."""

from benchmarks.hops import dying_prefill_server, short_request


def test_short_request_passes_few_files() -> None:
    hops = short_request()
    assert hops.calls > 300, "calls were not counted"
    assert (len(hops.files) <= 24, len(hops.classes) <= 26, hops.changes <= 300) == (True, True, True), str(hops)


def test_dying_prefill_server_passes_few_files() -> None:
    hops = dying_prefill_server()
    assert "scheduler/decode/transitions.py" in hops.files
    assert len(hops.files) <= 14, str(hops)
