"""GLM-4.7 and 5: as GLM-4.5, without newlines between the elements of a call."""

from __future__ import annotations

from diptych.shared.dialects.glm import Glm


class Glm47(Glm):
    """Either class reads both forms; this one's calls are written as the newer models write them."""

    tool_parsers = ("glm47",)
    separator = ""
