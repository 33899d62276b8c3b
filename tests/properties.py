"""Hypothesis with the settings of all property tests: import `given`, `seed`, `settings` and `st` from here.

A busy computer is slow to draw and to run an example. So there is no deadline, and slow drawing is no error.
`@settings` of a test changes what it names and keeps the rest.

Hypothesis would also draw the constants of all imported modules of this repository. It reads them for
seconds, and what a test draws would depend on which modules others have imported.
"""

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

__all__ = ["HealthCheck", "given", "seed", "settings", "st"]

settings.register_profile(
    "diptych",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("diptych")
providers._get_local_constants = lambda: providers._local_constants
