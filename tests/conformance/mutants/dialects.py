"""Planted bugs in the dialect of Hermes and in what it is made of."""

from __future__ import annotations

from typing import Any

from diptych.shared.dialects.hermes import Hermes
from diptych.shared.interfaces.dialect import ReasoningState, Steps
from tests.conformance.mutants.mutant import bugs_in, mutant_of

bug = bugs_in("dialect", "shared.dialects.hermes:Hermes", folder="shared.dialects.")
BLOCKS, CALLS = "parts.blocks", "parts.json_calls"

# fmt: off
bug("LosesTheSecondCall", "Of two blocks the second is text.",
    (BLOCKS, "            markers = self._starts(stream, is_inside)\n",
     "            markers = () if stream.has_call else self._starts(stream, is_inside)\n"))
bug("CallsWithoutTools", "A request without tools gets calls.",
    (BLOCKS, "if not stream.tools or (is_inside", "if (is_inside"))
bug("MarkersAreContent", "The end of a block is content.",
    (BLOCKS, "            if not start or not self.end:\n                return\n",
     "            return\n"))
bug("ReasoningStaysOpen", "Content behind the reasoning is reasoning.",
    (BLOCKS, "            else:\n                is_inside = False\n", "            else:\n"))
bug("ForgetsThePrompt", "Reasoning that the prompt has opened is content.",
    (BLOCKS, 'state == "open"', 'state == "opened"'))
bug("LosesLeadingSpace", "White space at the beginning of an answer is lost.",
    (BLOCKS, "stream.content(blank)", "stream.content(blank.strip())"))
bug("QuotesTheArguments", "The arguments are a JSON text that holds JSON.",
    (CALLS, "yield from stream.json(stream.arguments)",
     "yield from stream.json(lambda text: stream.arguments(dumps(text)))"))
bug("EndsAtAMarkerInAString", "A marker in a JSON string ends the call.",
    (CALLS, "        yield from stream.json(stream.arguments)",
     '        yield from stream.until("</x>", "\\n</tool_call>", emit=stream.arguments)'))
bug("WaitsForTheEnd", "A call is given out when it is whole, so a cut one is lost.",
    (CALLS, "if key in ARGUMENT_KEYS and name and not is_begun:", "if False:"))
bug("WritesAscii", "Letters beyond ASCII are escaped twice.",
    (CALLS, "json.dumps(value, ensure_ascii=False)", 'json.dumps(value).replace("\\\\", "\\\\\\\\")'))
bug("ClosesACutCall", "Arguments that are cut get an end that the model has not written.",
    (CALLS, "        yield from stream.json(stream.arguments)",
     "        if not (yield from stream.json(stream.arguments)):\n            stream.arguments('\"}')"))
bug("LeavesHalfAMarker", "The last character of the marker behind a block is content.",
    ("hermes", "starts, end = (START,), END", 'starts, end = (START,), "</tool_call"'))
# fmt: on


@mutant_of("dialect")
class ReadsSpelledMarkers(Hermes):
    """A special marker that is spelled out in text counts, and its token does not."""

    def read(self, stream: Any, state: ReasoningState) -> Steps[None]:
        stream.as_read = lambda text: text
        return super().read(stream, state)
