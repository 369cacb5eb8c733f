"""A dask cluster on this machine, as a script: prints its address, and ends when its stdin does.

Arguments: workers, threads of each, and how many workers a task may lose (dask's allowed-failures).
"""

from __future__ import annotations

import sys

import dask
from distributed import LocalCluster


def main() -> None:
    workers, threads, failures = map(int, sys.argv[1:])
    # A cluster looks 15 s after a worker's death whether it is back, and gives it up when it is down then, be it anew:
    # with it goes the run that it has just begun, which has killed nothing.
    settings = {"distributed.scheduler.allowed-failures": failures, "distributed.deploy.lost-worker-timeout": "1h"}
    with (
        dask.config.set(settings),
        LocalCluster(workers, threads_per_worker=threads, processes=True, dashboard_address=None) as cluster,
    ):
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
