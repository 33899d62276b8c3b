"""What an engine adds that computes prompts for another one."""

from __future__ import annotations

from diptych.shared.engine.build.features import Extras, Feature, Pools
from diptych.shared.engine.build.features.beside_model import num_kept_states
from diptych.shared.interfaces import SchedulerFeature
from diptych.shared.scheduling.last_pages import LastPages


class Prefill(Feature):
    """The last pages of prompts, and states at their ends, which are sent too."""

    def check(self) -> None:
        config = self.plan.config
        if self.plan.model_config.linear_attention and num_kept_states(config) == 0:
            split = "disaggregation=True" if config.disaggregation else "disaggregation_mode=prefill"
            raise ValueError(
                f"max_kept_states=0 does not work with {split}: states of prompts are sent from there"
            )

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        return [LastPages(pools.req_to_token_pool, pools.allocator, extras.drafter, extras.states)]
