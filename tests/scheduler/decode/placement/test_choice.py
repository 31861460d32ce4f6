"""The choice of a prefill server, by cached prefix and queue."""

from pdserve.scheduler.decode.placement.choice import REUSE_WEIGHT, Candidate, Choice, choose


def test_by_load_the_shortest_queue_that_is_open() -> None:
    candidates = [Candidate(30, cached=900), Candidate(20), Candidate(10, is_open=False)]
    assert choose("load", 1000, candidates) == Choice(1, "load")


def test_by_prefix_the_server_that_has_it() -> None:
    assert choose("prefix", 1000, [Candidate(0), Candidate(2000, cached=900)]) == Choice(1, "prefix")


def test_longer_queue_outweighs_the_prefix() -> None:
    """The server with the prefix is overloaded: the queue there takes longer than to compute the prefix again."""
    ahead = REUSE_WEIGHT * 900
    assert choose("prefix", 1000, [Candidate(0), Candidate(ahead - 1, cached=900)]) == Choice(1, "prefix")
    assert choose("prefix", 1000, [Candidate(0), Candidate(ahead + 1, cached=900)]) == Choice(0, "load")


def test_without_a_cached_prefix_the_queue_decides() -> None:
    assert choose("prefix", 1000, [Candidate(5), Candidate(4)]) == Choice(1, "load")
    assert choose("prefix", 1000, [Candidate(5), Candidate(4, is_open=False)]) == Choice(0, "load")


def test_prompt_waits_for_a_closed_server_with_its_prefix() -> None:
    candidates = [Candidate(0), Candidate(100, cached=900, is_open=False)]
    assert choose("prefix", 1000, candidates) == Choice(1, "prefix")
    assert choose("load", 1000, candidates) == Choice(0, "load")


def test_prompt_does_not_wait_for_a_closed_server_without_more_of_its_prefix() -> None:
    candidates = [Candidate(500, cached=200), Candidate(100, cached=200, is_open=False)]
    assert choose("prefix", 1000, candidates) == Choice(0, "prefix")


def test_equal_servers_fill_evenly() -> None:
    assert choose("prefix", 1000, [Candidate(0, fullness=0.5), Candidate(0, fullness=0.4)]) == Choice(1, "load")


def test_of_equal_servers_the_one_that_has_got_no_prompt_for_longer() -> None:
    """Requests that come one by one find all queues empty: the first server would get all of them."""
    assert choose("load", 1000, [Candidate(0, sent_at=2.0), Candidate(0, sent_at=1.0)]) == Choice(1, "load")
    assert choose("load", 1000, [Candidate(0, sent_at=2.0), Candidate(0)]) == Choice(1, "load")
    assert choose("load", 1000, [Candidate(0, sent_at=2.0), Candidate(5)]) == Choice(0, "load")


def test_short_shared_prefix_does_not_draw_everything_to_one_server() -> None:
    """20 % of the prompt is a system prompt that only the fuller server has."""
    shared = [Candidate(0, cached=200, fullness=0.5), Candidate(0, fullness=0.2)]
    assert choose("prefix", 1000, shared) == Choice(1, "load")
    conversation = [Candidate(0, cached=900, fullness=0.5), Candidate(0, fullness=0.2)]
    assert choose("prefix", 1000, conversation) == Choice(0, "prefix")


def test_prefix_counts_where_all_servers_are_full() -> None:
    """It counts less by what its server is fuller than the others: here a tenth of the prompt."""
    full = [Candidate(1000, cached=700, fullness=0.9), Candidate(0, fullness=0.8)]
    assert choose("prefix", 1000, full) == Choice(0, "prefix")


def test_server_of_the_failed_attempt_comes_last() -> None:
    assert choose("prefix", 1000, [Candidate(0, cached=900, failed=True), Candidate(5000)]) == Choice(1, "load")
    assert choose("prefix", 1000, [Candidate(0, cached=900, failed=True)]) == Choice(0, "prefix")


def test_no_server_takes_the_prompt() -> None:
    assert choose("prefix", 1000, []) is None
    assert choose("prefix", 1000, [Candidate(0, is_open=False)]) is None
    assert choose("load", 1000, [Candidate(0, cached=900, is_open=False)]) is None
