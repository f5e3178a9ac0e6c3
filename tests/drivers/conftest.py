"""What all tests of drivers get."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No example is too slow: how long one takes is told by the machine and its load.
settings.register_profile(
    "patient",
    settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
