"""Starts JAX in all processes of a job, and the error that ends a ring: what users may need of :mod:`torch_bridge.job`."""

from torch_bridge.job.peers import EXIT_PEER_FAILURE, PEER_TIMEOUT
from torch_bridge.job.runtime import START_TIMEOUT, shutdown, start
from torch_bridge.job.watchdog import PeerFailure, watch

__all__ = ["EXIT_PEER_FAILURE", "PEER_TIMEOUT", "START_TIMEOUT", "PeerFailure", "shutdown", "start", "watch"]
