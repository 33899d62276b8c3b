"""What an engine adds that computes prompts for another one."""

from __future__ import annotations

from diptych.shared.engine.build.features import Extras, Feature, Pools
from diptych.shared.interfaces import SchedulerFeature
from diptych.shared.scheduling.last_pages import LastPages


class Prefill(Feature):
    """The last pages of prompts, which are sent too."""

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        return [LastPages(pools.req_to_token_pool, self.plan.config.page_size, extras.drafter)]
