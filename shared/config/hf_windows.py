"""The sliding windows of a config.json: which layers have one, and of how many tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

from diptych.shared.config.fields import Fields


class Windows(NamedTuple):
    """How a family says which layers have a sliding window, where layer_types does not."""

    kind: Literal[
        "none",
        "other layer types",  # none has a window
        "all layers",
        "all but every nth",  # every nth layer sees all tokens
        "optional, from max_window_layers",  # off unless use_sliding_window is true
        "optional, all layers",
    ] = "none"
    default: int | None = None  # for a missing sliding_window
    every: int = 0  # n, unless sliding_window_pattern says otherwise


NO_WINDOWS = Windows()


def sliding_windows(fields: Fields, windows: Windows, num_hidden_layers: int) -> tuple[int, ...]:
    """Hugging Face counts the token itself in the window, we count the tokens before it."""
    if windows.kind == "other layer types":
        return ()
    window = None
    if windows.kind in ("all layers", "all but every nth"):
        # null is "no window"; only a missing key stands for the family's default.
        default = None if "sliding_window" in fields.values else windows.default
        window = fields.integer("sliding_window", default=default)
    elif windows.kind != "none" and fields.boolean("use_sliding_window", default=False):
        window = fields.integer("sliding_window", default=None)

    if "layer_types" in fields:
        has_window = _has_window_by_layer_types(fields, num_hidden_layers, window)
    elif windows.kind == "all but every nth":
        every = fields.integer("sliding_window_pattern", default=windows.every)
        has_window = [(layer_id + 1) % every != 0 for layer_id in range(num_hidden_layers)]
    elif windows.kind == "optional, from max_window_layers" and window is not None:
        first = fields.integer("max_window_layers", minimum=0)
        has_window = [layer_id >= first for layer_id in range(num_hidden_layers)]
    else:
        has_window = [window is not None] * num_hidden_layers
    return tuple(window - 1 if window is not None and here else -1 for here in has_window)


def _has_window_by_layer_types(fields: Fields, num_hidden_layers: int, window: int | None) -> list[bool]:
    layer_types = fields.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or any(kind not in known for kind in layer_types):
        raise fields.error("layer_types", f"a list of {' or '.join(known)}")
    if len(layer_types) != num_hidden_layers:
        raise ValueError(
            f"{fields.where}: layer_types has {len(layer_types)} entries, "
            f"num_hidden_layers is {num_hidden_layers}"
        )
    if window is None and "sliding_attention" in layer_types:
        raise ValueError(
            f"{fields.where}: layer_types has sliding_attention, but there is no window in use "
            f"(sliding_window {fields.values.get('sliding_window')!r}, "
            f"use_sliding_window {fields.values.get('use_sliding_window')!r})"
        )
    return [kind == "sliding_attention" for kind in layer_types]
