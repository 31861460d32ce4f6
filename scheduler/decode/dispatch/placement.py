"""Decides where a prompt is computed: by a prefill server, or by this decode server itself.

`place` is the whole decision, a pure function of its inputs. Its reasons are counted in /metrics, and the measured
inputs are gauges there and in /server_info.
"""

import dataclasses
from typing import Literal, NamedTuple

from ....configs.setting_types import LocalPrefillSetting

Where = Literal["local", "remote", "wait"]


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Measured times of the two ways to compute a prompt; None before the first measurement."""

    local_tokens_per_s: float | None
    """The rate of this server, while it also runs its decode steps. Until it is measured, another known rate is used.
    """
    remote_tokens_per_s: float | None
    overhead_s: float | None
    """Fixed cost of a prefill server: control messages, and the part of the transfer after the last chunk's compute."""
    step_s: float = 0.0
    """A decode step of this server: a local prompt waits for the end of the one in flight."""

    def local_s(self, tokens: int) -> float | None:
        """Time to compute `tokens` tokens here."""
        return None if self.local_tokens_per_s is None else self.step_s + tokens / self.local_tokens_per_s

    def remote_s(self, tokens: int) -> float | None:
        """Time to compute `tokens` tokens on an idle prefill server, and to get their KV."""
        if self.remote_tokens_per_s is None or self.overhead_s is None:
            return None
        return self.overhead_s + tokens / self.remote_tokens_per_s

    @property
    def crossover_tokens(self) -> float | None:
        """Prompts of fewer tokens are faster here if both servers are idle; inf if all prompts are, None if unknown."""
        local, remote = self.local_s(0), self.remote_s(0)
        if not self.local_tokens_per_s or not self.remote_tokens_per_s or local is None or remote is None:
            return None
        slope = 1 / self.local_tokens_per_s - 1 / self.remote_tokens_per_s
        if slope <= 0:
            return float("inf") if local < remote else 0.0
        return max(0.0, (remote - local) / slope)


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementInputs:
    """What the decision about one prompt depends on."""

    mode: LocalPrefillSetting
    tokens: int
    """Tokens to compute: those that are neither in the prefix cache of this server nor expected in the KV store."""
    costs: Costs
    paired: bool = True
    """A prefill server is paired that can hold the prompt."""
    expected: bool = False
    """None is paired yet, but one may be soon."""
    failed: bool = False
    """All attempts on prefill servers have failed."""
    refused: bool = False
    """Prefill servers have refused the prompt more than once."""
    shared_cpu: bool = False
    """The prefill servers compute on the CPU cores of this server: what they compute takes its time too."""
    remote_open: bool = True
    """A prefill server takes the prompt now."""
    remote_ahead: int = 0
    """Tokens that prefill servers compute before this prompt."""
    remote_shared: int = 0
    """The part of `tokens` that prefill servers are computing anyway, for another prompt with the same prefix."""
    local_open: bool = True
    """This server takes the prompt now."""
    local_ahead: int = 0
    """Tokens that this server computes before this prompt."""
    local_shared: int = 0
    """The part of `tokens` that this server is computing anyway, for another prompt with the same prefix."""
    local_fits: bool = True
    """This server can compute the prompt, now or later. With HiSparse, the hot pool has to hold all its rows; with a
    window, the KV pool all its pages beside those of its samples.
    """
    local_room: bool = True
    """The rows of the prompt fit the hot pool now, beside those of other requests."""


class Placement(NamedTuple):
    """Where a prompt is computed, or that it waits, and why."""

    where: Where
    reason: str


def place(inputs: PlacementInputs) -> Placement:
    """Choose a side. The prompt waits if that side does not take it now, even if the other side would."""
    side, reason = _choose(inputs)
    is_open = inputs.local_open if side == "local" else inputs.remote_open
    return Placement(side if is_open else "wait", reason)


def _choose(inputs: PlacementInputs) -> tuple[Where, str]:
    if inputs.mode == "never":
        return "remote", "never"
    if inputs.mode == "always":
        return "local", "always"
    if not inputs.local_fits:
        return "remote", "hot_rows"
    if inputs.failed:
        return "local", "failed"
    if not inputs.paired:
        return ("wait", "pairing") if inputs.expected else ("local", "absent")
    if inputs.refused and not inputs.remote_open:
        return "local", "refused"
    if not inputs.local_room:
        return "remote", "hot_rows"
    costs = inputs.costs
    local, remote = inputs.tokens - inputs.local_shared, inputs.tokens - inputs.remote_shared
    local_s, remote_s = costs.local_s(local + inputs.local_ahead), costs.remote_s(remote + inputs.remote_ahead)
    if local_s is None or remote_s is None:
        return "remote", "unmeasured"
    if inputs.shared_cpu:
        return "local", "shared_cpu"
    if local_s >= remote_s:
        return "remote", "faster"
    alone_local_s, alone_remote_s = costs.local_s(local), costs.remote_s(remote)
    assert alone_local_s is not None, "known, because the time with a queue is"
    assert alone_remote_s is not None, "known, because the time with a queue is"
    return "local", "short" if alone_local_s < alone_remote_s else "queue"
