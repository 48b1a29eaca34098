"""Server reflection over every service of this server, health's List among them."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from octavo.v1 import capacity_pb2, generation_pb2, tokenization_pb2
from service.health import HEALTH_SERVICE, health_file

FILES = (generation_pb2.DESCRIPTOR, tokenization_pb2.DESCRIPTOR, capacity_pb2.DESCRIPTOR)


def service_names() -> tuple[str, ...]:
    own = tuple(service.full_name for file in FILES for service in file.services_by_name.values())
    return (*own, HEALTH_SERVICE, reflection.SERVICE_NAME)


def enable_reflection(server: aio.Server) -> None:
    """Uses a descriptor pool of its own, since the default one has the health service without List."""
    pool = descriptor_pool.DescriptorPool()
    for file in _with_dependencies((*FILES, reflection_pb2.DESCRIPTOR)):
        copy = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copy)
        pool.AddSerializedFile(copy.SerializeToString())
    pool.AddSerializedFile(health_file().SerializeToString())
    reflection.enable_server_reflection(service_names(), server, pool)


def _with_dependencies(files: Iterable[FileDescriptor]) -> list[FileDescriptor]:
    """Each file once, after those that it imports."""
    ordered: dict[str, FileDescriptor] = {}

    def visit(file: FileDescriptor) -> None:
        for dependency in file.dependencies:
            visit(dependency)
        ordered.setdefault(file.name, file)

    for file in files:
        visit(file)
    return list(ordered.values())
