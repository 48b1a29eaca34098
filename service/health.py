"""grpc.health.v1 with Check, Watch and List. "" is liveness, the generation service's name is readiness.

The stock servicer starts as SERVING and has no List, and the installed messages may lack List's. The protocol's file is
therefore completed here, in a descriptor pool of its own, which collides with no other copy in the process.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc import aio
from grpc_health.v1 import health_pb2

from service.replica import Replica
from service.status import abort, draining, unknown_service

PACKAGE = "grpc.health.v1"
HEALTH_SERVICE = "grpc.health.v1.Health"
LIVENESS = ""
GENERATION_SERVICE = "octavo.v1.GenerationService"
OTHER_SERVICES = ("octavo.v1.TokenizationService", "octavo.v1.CapacityService")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context = aio.ServicerContext[Any, Any]


def health_file() -> descriptor_pb2.FileDescriptorProto:
    """The installed health.proto, with List and its messages if they are missing."""
    file = descriptor_pb2.FileDescriptorProto()
    health_pb2.DESCRIPTOR.CopyToProto(file)
    if any(message.name == "HealthListRequest" for message in file.message_type):
        return file
    file.message_type.add(name="HealthListRequest")
    response = file.message_type.add(name="HealthListResponse")
    response.field.add(
        name="statuses",
        number=1,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
        type_name=".grpc.health.v1.HealthListResponse.StatusesEntry",
    )
    entry = response.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    optional = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    entry.field.add(name="key", number=1, label=optional, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING)
    entry.field.add(
        name="value",
        number=2,
        label=optional,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
        type_name=".grpc.health.v1.HealthCheckResponse",
    )
    file.service[0].method.add(
        name="List",
        input_type=".grpc.health.v1.HealthListRequest",
        output_type=".grpc.health.v1.HealthListResponse",
    )
    return file


class HealthMessages:
    """The protocol's message classes, all of one pool."""

    def __init__(self) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(health_file().SerializeToString())

        def message_class(name: str) -> Any:
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

        self.CheckRequest = message_class("HealthCheckRequest")
        self.CheckResponse = message_class("HealthCheckResponse")
        self.ListRequest = message_class("HealthListRequest")
        self.ListResponse = message_class("HealthListResponse")


class HealthService:
    """Answers from the replica's state at the time of the question; watches follow it."""

    def __init__(self, replica: Replica, messages: HealthMessages) -> None:
        self._replica = replica
        self._messages = messages

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        messages = self._messages
        check = {
            "request_deserializer": messages.CheckRequest.FromString,
            "response_serializer": messages.CheckResponse.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.Check, **check),
                "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, **check),
                "List": grpc.unary_unary_rpc_method_handler(
                    self.List,
                    request_deserializer=messages.ListRequest.FromString,
                    response_serializer=messages.ListResponse.SerializeToString,
                ),
            },
        )

    def statuses(self) -> dict[str, int]:
        """Liveness fails only with an engine that is gone for good: a stalled one may recover."""
        replica = self._replica
        live = SERVING if replica.alive else NOT_SERVING
        ready = SERVING if replica.ready else NOT_SERVING
        return {LIVENESS: live, GENERATION_SERVICE: ready, **dict.fromkeys(OTHER_SERVICES, live)}

    async def Check(self, request: Any, context: Context) -> Any:
        status = self.statuses().get(request.service)
        if status is None:
            await abort(context, unknown_service(request.service))
        return self._messages.CheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> None:
        changes, last = self._replica.changes, None
        while not self._replica.stopping:
            seen = changes.value
            status = self.statuses().get(request.service, SERVICE_UNKNOWN)
            if status != last:
                await context.write(self._messages.CheckResponse(status=status))
                last = status
            await changes.wait_beyond(seen)
        await abort(context, draining())

    async def List(self, request: Any, context: Context) -> Any:
        response = self._messages.ListResponse()
        for name, status in self.statuses().items():
            response.statuses[name].status = status
        return response
