"""The simulated router."""

from diptych.shared.server.router.policy import RouterSettings
from diptych.shared.tools.bench.router_simulation import RoutingCase, policies, simulate


def test_simulated_conversations_hit_more_than_with_round_robin() -> None:
    case = RoutingCase(num_conversations=150, system_chars=1000, turn_chars=100, cache_chars=20_000)
    results = {name: simulate(case, name, each) for name, each in policies().items()}
    assert results["cache-aware"].hit_rate > results["round robin"].hit_rate + 0.1
    assert results["cache-aware"].hit_rate > results["least load"].hit_rate + 0.1
    defaults = RouterSettings()
    for result in results.values():
        assert result.final_loads == (0,) * case.num_replicas
        assert sum(result.num_sent) == case.num_conversations * case.num_turns
        assert result.max_load <= max(defaults.balance_abs, 1) * 2 + result.mean_load * defaults.balance_rel
