"""Hypothesis with the settings of all property tests: import `given`, `settings` and `st` from here.

A busy computer is slow to draw and to run an example. So there is no deadline, and slow drawing is no error.
`@settings` of a test changes what it names and keeps the rest.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

__all__ = ["HealthCheck", "given", "settings", "st"]

settings.register_profile(
    "diptych",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("diptych")
