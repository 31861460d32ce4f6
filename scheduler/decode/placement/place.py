"""Decides where a prompt is computed with `--local-prefill auto`: by a prefill server, or by this decode server itself.

Prefill has servers of its own so that tokens come in steady gaps. So with `auto`, this server computes only what hardly
lengthens a step, and prompts whose first token a prefill server would bring late.

`place` is the whole decision, a pure function of its inputs. Its reasons are counted in /metrics, and the measured
inputs are gauges there and in /server_info.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

Where = Literal["local", "remote"]
MUCH_LATER = 2
"""A prompt whose first token is late in any case is computed here if a prefill server would take this many times as
long.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementInputs:
    """What the decision about one prompt depends on. Times count from now, and are None before a measurement."""

    servers: Literal["paired", "expected", "absent"] = "paired"
    """Whether a prefill server is paired that can hold the prompt; `expected` if the first one may pair soon."""
    failed: Literal["failed", "refused"] | None = None
    """All attempts on prefill servers have failed, or servers have refused the prompt more than once and none takes it.
    """
    room: Literal["now", "later", "never"] = "now"
    """Whether this server has the memory to compute the prompt. With HiSparse, the hot pool has to hold all its rows;
    with a window, the KV pool all its pages beside those of its samples.
    """
    shared_device: bool = False
    """The prefill servers compute on the GPU or the CPU cores of this server: what they compute takes its time too."""
    short: bool = False
    """The tokens to compute here hardly lengthen a step of this server."""
    due_s: float = math.inf
    """The first token is late after this time."""
    remote_s: float | None = None
    """When a prefill server is expected to have computed and sent the prompt, after those before it."""
    local_s: float | None = None
    """When this server is expected to have computed it, after those before it and beside its decode steps."""


class Placement(NamedTuple):
    """Where a prompt is computed, and why. It waits if that side does not take it now, even if the other one would, and
    if `where` is None.
    """

    where: Where | None
    reason: str


def place(inputs: PlacementInputs) -> Placement:
    """Choose a side."""
    return Placement(*_choose(inputs))


def _choose(inputs: PlacementInputs) -> tuple[Where | None, str]:
    if inputs.room == "never":
        return "remote", "hot_rows"
    if inputs.failed == "failed":
        return "local", "failed"
    if inputs.servers != "paired":
        return (None, "pairing") if inputs.servers == "expected" else ("local", "absent")
    if inputs.failed == "refused":
        return "local", "refused"
    if inputs.room == "later":
        return "remote", "hot_rows"
    if inputs.local_s is None or inputs.remote_s is None:
        return "remote", "unmeasured"
    if inputs.shared_device:
        return "local", "shared_device"
    if inputs.short:
        return "local", "short"
    if inputs.remote_s <= inputs.due_s:
        return "remote", "on_time"
    if inputs.local_s <= max(inputs.due_s, inputs.remote_s / MUCH_LATER):
        return "local", "late"
    return "remote", "late"
