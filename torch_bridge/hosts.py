"""What JAX's CPU collectives need where the ranks are on several hosts."""

import ipaddress
import os
from typing import Any


def let_gloo_reach_other_hosts(address: str) -> None:
    """Make JAX's gloo listen where the other hosts can reach it: on torch's ``GLOO_SOCKET_IFNAME``, else at ``address``, with which
    this host reaches the coordinator's. By itself it takes the address of the host's name, often 127.0.1.1. Before the backends."""
    from jax._src import xla_bridge

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None
    hostname = None if interface or ipaddress.ip_address(address).is_loopback else address

    def cpu_client() -> Any:
        from jax._src import distributed
        from jaxlib import _jax

        collectives = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname, interface)
        return xla_bridge.make_cpu_client(collectives)

    if hostname or interface:
        xla_bridge.register_backend_factory("cpu", cpu_client, priority=0, fail_quietly=False)
