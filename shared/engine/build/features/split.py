"""What an engine adds that computes prompts for another one."""

from __future__ import annotations

from diptych.shared.engine.build.features import Extras, Feature, Pools
from diptych.shared.engine.build.features.beside_model import num_kept_states
from diptych.shared.interfaces import SchedulerFeature
from diptych.shared.scheduling.last_pages import LastPages


class Prefill(Feature):
    """The last pages of prompts, and states at their ends, which are sent too."""

    def check(self) -> None:
        if self.plan.model_config.linear_attention and num_kept_states(self.plan.config) == 0:
            raise ValueError(
                "max_kept_states=0 does not work with disaggregation: states of prompts are sent from there"
            )

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        return [LastPages(pools.req_to_token_pool, pools.allocator, extras.drafter, extras.states)]
