"""The command ``ray``, on the loopback only, also for nodes beside the head: ``loopback_ray.py start --address ...``.

Ray makes 127.0.0.1 the machine's public address, and listens on all interfaces, unless the environment says that this
is a platform without clusters (see ``rex_ray/train/local_cluster.py``); then it refuses a second node. That refusal is
lifted here, in this process alone: those that it starts inherit the environment as it is.
"""

from __future__ import annotations

import sys

from ray._private import ray_constants, services
from ray.scripts.scripts import main

if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    sys.exit(main())
