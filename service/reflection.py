"""Server reflection over every service of this server, health's List among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2
from grpc import aio
from grpc_channelz.v1 import channelz_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from xds.service.orca.v3 import orca_pb2

from octavo.v1 import admin_pb2, capacity_pb2, generation_pb2, tokenization_pb2
from service.health import HEALTH_SERVICE, health_file
from service.orca import SERVICE as ORCA_SERVICE

SERVICES = (
    "octavo.v1.GenerationService",
    "octavo.v1.TokenizationService",
    "octavo.v1.CapacityService",
    HEALTH_SERVICE,
    ORCA_SERVICE,
    reflection.SERVICE_NAME,
)
ADMIN_SERVICES = ("octavo.v1.AdminService", "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)

# error_details lets clients read the details of a status.
FILES = (
    generation_pb2.DESCRIPTOR,
    tokenization_pb2.DESCRIPTOR,
    capacity_pb2.DESCRIPTOR,
    admin_pb2.DESCRIPTOR,
    orca_pb2.DESCRIPTOR,
    channelz_pb2.DESCRIPTOR,
    error_details_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)


def enable_reflection(server: aio.Server, services: Sequence[str]) -> None:
    """Uses a descriptor pool of its own: the default one has the health service without List, and Python's descriptors
    lack the JSON names that clients print."""
    pool = descriptor_pool.DescriptorPool()
    for file in _with_dependencies(FILES):
        pool.AddSerializedFile(_with_json_names(file).SerializeToString())
    pool.AddSerializedFile(health_file().SerializeToString())
    reflection.enable_server_reflection(services, server, pool)


def _with_json_names(file: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    copy = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(copy)
    messages = list(copy.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            first, *rest = field.name.split("_")
            field.json_name = first + "".join(part.capitalize() for part in rest)
    return copy


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
