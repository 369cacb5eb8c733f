"""For all tests: how Hypothesis runs them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair: with others at work on it a quick one may take a second.
settings.register_profile("flipper", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flipper")
