"""Sliding windows, from config.json. No torch.

A layer with a window of W tokens sees the last W tokens, its own included. All windowed layers of a model have the same
window. Which layers have one is what transformers 5.17 computes.
"""

from pathlib import Path
from typing import NamedTuple

from ...common.errors import StartupError
from ..formats.json_fields import Json, bare, integer, shown

FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of `layer_types`."""


class WindowRule(NamedTuple):
    """Which configurations of a family have a window, and in which layers."""

    default: int | None  # the window of a configuration that does not mention one
    everywhere: bool = False  # all layers have it
    switched: bool = False  # only with `use_sliding_window`


class Windows(NamedTuple):
    """The window of a model, in tokens, and which layers have it; (None, ()) without windows."""

    window: int | None
    windowed: tuple[bool, ...]


NO_WINDOWS = Windows(None, ())


def read_windows(path: Path, raw: Json, num_layers: int, rule: WindowRule | None) -> Windows:
    """The fields of a decoder without sparse attention; raises StartupError."""
    window = _window(path, raw, rule)
    kinds = read_layer_types(path, raw, num_layers, (FULL,) if window is None else (FULL, SLIDING))
    if rule is not None and rule.everywhere:
        return _same_everywhere(path, window, kinds, num_layers)
    if window is None:
        return NO_WINDOWS
    if kinds is None:
        first = integer(path, raw, "max_window_layers", 28, least=0)
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return Windows(window, tuple(kind == SLIDING for kind in kinds)) if SLIDING in kinds else NO_WINDOWS


def read_alternating_windows(path: Path, raw: Json, num_layers: int, *, period: int = 2, default: int = 128) -> Windows:
    """The fields of families where by default all layers but every `period`-th have a window; raises StartupError."""
    kinds = read_layer_types(path, raw, num_layers, (FULL, SLIDING))
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]
    if SLIDING not in kinds:
        return NO_WINDOWS
    return Windows(integer(path, raw, "sliding_window", default), tuple(kind == SLIDING for kind in kinds))


def read_layer_types(path: Path, raw: Json, num_layers: int, supported: tuple[str, ...]) -> list[str] | None:
    """`layer_types`; None if the configuration has none. Raises StartupError."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise StartupError(
            f"{path}: layer_types must have one entry for each of {num_layers} layers, got {shown(kinds)}"
        )
    other = sorted({str(kind) for kind in kinds} - {*supported})
    if other:
        without = "" if SLIDING in supported else " (there is no sliding_window)" if other == [SLIDING] else ""
        raise StartupError(f"{path}: layer_types has {bare(other[0])}{without}; supported here: {', '.join(supported)}")
    return [str(kind) for kind in kinds]


def _window(path: Path, raw: Json, rule: WindowRule | None) -> int | None:
    if rule is None or (rule.switched and not raw.get("use_sliding_window")):
        return None
    if raw.get("sliding_window", rule.default) is None:
        return None
    return integer(path, raw, "sliding_window", rule.default)


def _same_everywhere(path: Path, window: int | None, kinds: list[str] | None, num_layers: int) -> Windows:
    if window is None:
        return NO_WINDOWS
    if kinds is not None and FULL in kinds:
        raise StartupError(
            f"{path}: layer_types has {FULL} beside sliding_window = {window}, which all layers of this family have"
        )
    return Windows(window, (True,) * num_layers)
