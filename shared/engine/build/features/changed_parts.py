"""Features that change which parts an engine has, and add none."""

from __future__ import annotations

from typing import Any

from diptych.shared import registry
from diptych.shared.config.deterministic_flags import check_deterministic_model
from diptych.shared.engine.build.features import Feature


class Deterministic(Feature):
    """The bits of an answer depend on its request alone."""

    def check(self) -> None:
        check_deterministic_model(self.plan.config, self.plan.model_config)

    def implementation(self, component: str, impl: Any) -> Any:
        if component in self.plan.given:
            return impl
        return registry.load_deterministic(str(self.plan.config.panel), component) or impl


class Disaggregation(Feature):
    """Prefill and decode in two engines; `processes/disaggregated.py` starts them."""

    def check(self) -> None:
        model_config = self.plan.model_config
        if model_config.mla is not None:
            raise ValueError(
                "disaggregation transfers K and V of one shape, and "
                f"{model_config.architecture} caches latent rows; it runs in one engine"
            )
