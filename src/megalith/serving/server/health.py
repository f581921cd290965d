"""gRPC's own services: health and reflection. guard.py limits their calls."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from megalith.errors import MissingDependencyError
from megalith.serving.proto.message_types import POOL

HEALTH = "grpc.health.v1.Health"


def _module(package: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError.of_extra(f"serving needs {package}", "serve") from error


class Health:
    """Health of the services and models, for gRPC's health checks; "" is the server itself."""

    def __init__(self) -> None:
        health = _module("grpcio-health-checking", "grpc_health.v1.health")
        self._messages = _module("grpcio-health-checking", "grpc_health.v1.health_pb2")
        self._servicer = health.HealthServicer()
        self._known: dict[str, Any] = {}
        self.set(())

    def add_to(self, server: Any) -> None:
        """Add the service to a gRPC server."""
        stubs = _module("grpcio-health-checking", "grpc_health.v1.health_pb2_grpc")
        stubs.add_HealthServicer_to_server(self._servicer, server)

    def set(self, serving: Iterable[str]) -> None:
        """Set which services and models are SERVING; the server itself is, if there are any."""
        now = set(serving)
        states = self._messages.HealthCheckResponse
        for name in {*self._known, *now, ""}:
            state = states.SERVING if name in now or (now and not name) else states.NOT_SERVING
            if self._known.get(name) != state:  # watchers are notified of changes only
                self._known[name] = state
                self._servicer.set(name, state)

    def shut_down(self) -> None:
        """Set everything to NOT_SERVING permanently."""
        self._servicer.enter_graceful_shutdown()


def add_reflection(server: Any, services: Sequence[str]) -> None:
    """Add reflection, by which clients such as grpcurl list services, methods and messages."""
    reflection = _module("grpcio-reflection", "grpc_reflection.v1alpha.reflection")
    for name in ("grpc_health.v1.health_pb2", "grpc_reflection.v1alpha.reflection_pb2"):
        POOL.AddSerializedFile(importlib.import_module(name).DESCRIPTOR.serialized_pb)
    names = [*services, HEALTH, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server, pool=POOL)
