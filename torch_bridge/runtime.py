"""Starts JAX in all processes of a job, and the error that ends a ring: what users may need of :mod:`torch_bridge.start`
and :mod:`torch_bridge.failures`."""

from torch_bridge.failures.peers import EXIT_PEER_FAILURE, PEER_TIMEOUT
from torch_bridge.failures.watchdog import PeerFailure, watch
from torch_bridge.start.runtime import START_TIMEOUT, shutdown, start

__all__ = ["EXIT_PEER_FAILURE", "PEER_TIMEOUT", "START_TIMEOUT", "PeerFailure", "shutdown", "start", "watch"]
