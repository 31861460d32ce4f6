"""The options of `pdserve demo`, beside the settings of its servers. Light: every command imports it."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ...configs.flags import Flag


@dataclass(frozen=True, slots=True)
class DemoOptions:
    prompt: Annotated[str, Flag(metavar="TEXT"), Field(description="what to ask")] = "What is the capital of France?"
    max_new_tokens: Annotated[int, Field(ge=1, description="maximum tokens to generate")] = 64
    keep: Annotated[
        bool | None, Field(description="keep the servers running afterwards (default: yes on a terminal)")
    ] = None
