"""What validation needs to know of the model behind a replica."""

from __future__ import annotations

from dataclasses import dataclass

from engine import EngineInfo
from service.convert.fields import refuse
from service.status import unknown_model


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What validation needs to know of the model behind this replica. `aliases`: further names it answers to."""

    name: str
    info: EngineInfo
    aliases: frozenset[str] = frozenset()

    def check_name(self, asked: str) -> None:
        if asked and asked != self.name and asked not in self.aliases:
            raise refuse(unknown_model(asked, self.name))
