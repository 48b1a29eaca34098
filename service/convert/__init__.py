"""Between protobuf messages and the service's own values: only this package reads and builds messages."""
