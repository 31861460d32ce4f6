"""Turns of clients: round robin, the cheapest first, and none waits for ever."""

from pdserve.server.engine.turns import MOST_OVERTAKEN, Turns


def taken(turns: Turns[str], without: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    turn = turns.take(without)
    assert turn is not None
    return turn[1]


def test_turns_go_round_the_clients_and_the_cheapest_is_first() -> None:
    turns: Turns[str] = Turns()
    for cost in (9, 7, 8):
        turns.add("a", f"a{cost}", cost)
    turns.add("b", "b5", 5)
    turns.add("b", "b4", 4)
    assert [taken(turns) for _ in range(5)] == ["a7", "b4", "a8", "b5", "a9"]
    assert turns.take(set()) is None
    assert len(turns) == 0


def test_clients_with_work_in_progress_have_no_turn() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a1", 1)
    turns.add("b", "b2", 2)
    assert taken(turns, {"a"}) == "b2"
    assert turns.take({"a"}) is None
    assert "a1" in turns


def test_work_of_two_clients_is_done_in_the_first_of_their_turns() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "large", 9)
    turns.add("a", "small", 1)
    turns.add("b", "large", 9)
    assert [taken(turns), taken(turns)] == ["small", "large"]
    assert turns.take(set()) is None


def test_costly_work_is_overtaken_a_limited_number_of_times() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "costly", 100)
    order = []
    for number in range(2 * MOST_OVERTAKEN):
        turns.add("a", f"cheap {number}", 1)
        order.append(taken(turns))
    assert order.index("costly") == 0 or order.index("costly") == MOST_OVERTAKEN


def test_room_is_made_by_the_client_that_has_most() -> None:
    turns: Turns[str] = Turns()
    for cost in (1, 3, 2):
        turns.add("a", f"a{cost}", cost)
    assert turns.costliest_of_another("a") is None
    assert turns.costliest_of_another("b") == "a3"
    turns.add("b", "b1", 1)
    assert turns.costliest_of_another("b") == "a3"
    turns.add("b", "b2", 2)
    assert turns.costliest_of_another("b") is None, "it would have as many as the other"
