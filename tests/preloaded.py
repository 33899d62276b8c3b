"""What engines and servers on a CPU import until they answer: `tests.forked` does it once."""

import os
from importlib import import_module
from importlib.util import find_spec

MODULES = (
    "transformers.tokenization_utils_tokenizers",
    "diptych.reference.attention",
    "diptych.reference.decoder",
    "diptych.reference.model_runner",
    "diptych.reference.sampler",
    "diptych.reference.scheduler",
    "diptych.shared.engine.build.assembly",
    "diptych.shared.engine.processes.start",
    "diptych.shared.modeling.moe_modules",
    "diptych.shared.server.engine.engine_loop",
    "diptych.shared.server.serve",
    "diptych.shared.text.template_limits",
    "diptych.shared.tools.cli",
)

OPTIONAL = ("xgrammar",)

os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it when it is imported, and children draw no bars
for name in MODULES:
    import_module(name)
for name in filter(find_spec, OPTIONAL):
    import_module(name)
