"""Records when a request passes certain functions of the servers, for `benchmarks.ttft`.

Python imports this module at start if its folder is in PYTHONPATH. With HOP_TRACE=FILE it wraps the functions in POINTS
when their modules are imported. Every call appends a line: nanoseconds of the system-wide monotonic clock, label.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# module -> functions and labels; "+" marks the end of a call too, "%" adds the type of the first argument
POINTS = {
    "pdserve.server.engine.leader_client": {"LeaderClient.open": "frontend: submit"},
    "pdserve.server.engine.inbox": {"Inbox.put": "frontend: % arrives"},
    "pdserve.server.api.service.generation": {"_encode_events": "frontend: write"},
    "pdserve.scheduler.engine.frontend_link": {"FrontendLink.send": "link: % queued"},
    "pdserve.scheduler.engine.decode_engine": {"DecodeEngine.handle": "decode loop: %"},
    "pdserve.scheduler.engine.prefill_engine": {"PrefillEngine.handle": "prefill loop: %"},
    "pdserve.scheduler.engine.loop": {"EngineLoop._take_step": "loop: %"},
    "pdserve.scheduler.ranks.rank": {
        "RankEngine._start_step": "rank: start+",
        "RankEngine._finish_step": "rank: finish+",
    },
    "pdserve.transfer.control.thread": {
        "Control._send_numbered": "control: send %",
        "Control._emit": "control: receive %",
    },
    "pdserve.transfer.data.sender": {"PeerSender._send": "sender: send+"},
}


def _wrap(function: Callable[..., Any], label: str, log: int) -> Callable[..., Any]:
    ends = label.endswith("+")

    def note(text: str) -> None:
        os.write(log, f"{time.monotonic_ns()} {text}\n".encode())

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        text = label.rstrip("+")
        if "%" in text:
            kinds = [type(getattr(value, "message", value)).__name__ for value in args]
            text = text.replace("%", next((kind for kind in kinds[1:] if kind not in ("str", "function")), "?"))
        note(text)
        result = function(*args, **kwargs)
        if ends:
            note(text + " ends")
        return result

    return traced


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, log: int) -> None:
        self._log = log

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in POINTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for path_in_module, label in POINTS[name].items():
                owner: Any = module
                *parents, last = path_in_module.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                setattr(owner, last, _wrap(getattr(owner, last), label, self._log))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if (_seconds := os.environ.get("SWITCH_INTERVAL_S")) is not None:  # to compare intervals of the interpreter
    sys.setswitchinterval(float(_seconds))
    sys.setswitchinterval = lambda _interval: None
if (_file := os.environ.get("HOP_TRACE")) is not None and "pdserve." in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, _Finder(os.open(_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)))
