"""Templar's objects: keys, payloads, aggregator objects and gather results, under Templar's names.

The page "Coming from Templar" lists the names of Templar and where they are here.
"""

from megalith.compat.templar.keys import aggregator_key, gradient_key, peer_locations, peer_stores
from megalith.compat.templar.payloads import convert_payload, read_payload, write_payload
from megalith.compat.templar.results import (
    gather_result,
    read_aggregator,
    templar_metrics,
    write_aggregator,
)

__all__ = [
    "aggregator_key",
    "convert_payload",
    "gather_result",
    "gradient_key",
    "peer_locations",
    "peer_stores",
    "read_aggregator",
    "read_payload",
    "templar_metrics",
    "write_aggregator",
    "write_payload",
]
