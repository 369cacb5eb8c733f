"""Engines: where a campaign's runs are made, each on a concurrent.futures.Executor.

An engine of one's own is Engine(executor, runs at once): a ThreadPoolExecutor, a ProcessPoolExecutor, or any other
whose workers see the campaign's folder.
"""

from __future__ import annotations

from flipper.campaigns.engines.choice import open_engine
from flipper.campaigns.engines.engine import Engine

__all__ = ["Engine", "open_engine"]
