"""What each process of test_distributed.py does: joins the others, and then what its first argument says."""

import json
import os
import signal
import sys
import time

from tunix_lite.distributed.agreement import process_info
from tunix_lite.distributed.join import agree, exit_at_once_on_failure, exit_when_a_peer_is_lost, heartbeat, initialise
from tunix_lite.distributed.process_place import LaunchConfig

rank, what = int(os.environ["RANK"]), sys.argv[1]
# One where it is killed: jax is done with a first exchange while that of a second device is still being set up, and
# whoever sets up with one that is gone notices after heartbeat_timeout only.
devices = 1 if what == "killed once" else 2
is_first_try = not os.path.exists("tried")
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}  # before jax


def join():
    stall_timeout = 2 if what == "stopped" else 1800
    launch = LaunchConfig(timeout=120, stall_timeout=stall_timeout, max_restarts=int(what == "killed once"))
    return initialise(launch, os.environ, process_info({"seed": 0}, f"folder{rank}"))


with exit_at_once_on_failure(), exit_when_a_peer_is_lost():
    joined = join()
    assert initialise(LaunchConfig(), {}, None) == joined  # once
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    place, agreed = joined
    total = int(multihost_utils.process_allgather(np.int32(place.process_id + 1)).sum())
    print(
        json.dumps([place.process_id, jax.device_count(), jax.local_device_count(), total, agreed.folder]), flush=True
    )
    if what == "join":
        jax.jit(lambda x: x * 2)(np.ones(1)).block_until_ready()
        for values, error in (({"weights": "same"}, None), ({"weights": f"of {rank}"}, None), ({}, ["no", None][rank])):
            try:
                agree(values, error)
            except ValueError as problem:
                print(problem, flush=True)
    if what == "killed once":
        while is_first_try:
            if rank == 1:
                open("tried", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            multihost_utils.process_allgather(np.int32(1))
    if what == "stopped":
        while True:
            heartbeat("step 3")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            multihost_utils.process_allgather(np.int32(1))
            time.sleep(0.05)
