"""Features that change which parts an engine has, or how they are compiled, and add none."""

from __future__ import annotations

import sys
from pathlib import Path

from diptych.shared.config.deterministic_flags import check_deterministic_model
from diptych.shared.engine import kernel_cache
from diptych.shared.engine.build.features import Feature


class CompiledKernels(Feature):
    """Kernels that were compiled before, from a file."""

    def check(self) -> None:
        print(kernel_cache.unpack(Path(self.plan.config.kernel_cache or "")), file=sys.stderr)


class Deterministic(Feature):
    """The bits of an answer depend on its request alone."""

    def check(self) -> None:
        check_deterministic_model(self.plan.config, self.plan.model_config)
