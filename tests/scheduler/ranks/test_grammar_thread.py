"""Grammars are compiled beside the steps, and each is reported once."""

import queue
import threading

from pdserve.common.sampling import Grammar
from pdserve.models.grammar.compiler import GrammarCompiler, Vocabulary
from pdserve.scheduler.messages.ranks import GrammarReady, PrepareGrammar
from pdserve.scheduler.ranks.grammar_thread import GrammarThread

TOKENS = [b"<eos>", *(bytes([value]) for value in range(256))]
GRAMMAR = Grammar("regex", "[a-d]{6}")


def bytes_of(text: str) -> list[int]:
    return [value + 1 for value in text.encode()]


def test_grammar_is_reported_when_it_is_compiled_or_found_invalid_and_at_once_when_cached() -> None:
    compiler = GrammarCompiler(lambda: Vocabulary(TOKENS, special={}, eos_token_ids=(0,), encode=bytes_of))
    reports: queue.SimpleQueue[GrammarReady] = queue.SimpleQueue()
    thread = GrammarThread(compiler, 3, reports.put)
    thread.prepare(PrepareGrammar(1, GRAMMAR))
    assert reports.get(timeout=60) == GrammarReady(3, 1)
    thread.prepare(PrepareGrammar(2, Grammar("regex", "[")))
    invalid = reports.get(timeout=60)
    assert (invalid.number, invalid.problem is None) == (2, False)
    thread.prepare(PrepareGrammar(3, GRAMMAR))
    assert reports.get_nowait() == GrammarReady(3, 3)
    thread.close()
    assert reports.empty()


def test_dropped_grammar_is_not_compiled() -> None:
    """It waits behind another one, which was dropped too late."""
    reports: queue.SimpleQueue[GrammarReady] = queue.SimpleQueue()
    go = threading.Event()

    def report(ready: GrammarReady) -> None:
        reports.put(ready)
        assert go.wait(60)

    compiler = GrammarCompiler(lambda: Vocabulary(TOKENS, special={}, eos_token_ids=(0,), encode=bytes_of))
    thread = GrammarThread(compiler, 0, report)
    grammars = [Grammar("regex", f"[a-d]{{{count}}}") for count in range(1, 4)]
    thread.prepare(PrepareGrammar(0, grammars[0]))
    assert reports.get(timeout=60).number == 0
    for number in (1, 2):
        thread.prepare(PrepareGrammar(number, grammars[number]))
    thread.drop(0)
    thread.drop(1)
    go.set()
    assert reports.get(timeout=60).number == 2
    assert [compiler.is_cached(grammar) for grammar in grammars] == [True, False, True]
    thread.close()
