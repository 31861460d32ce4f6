"""Routing fields of a call: the ids of its requests, their priority and deadline, and the prefill server.

With a list of prompts, `rid` and `bootstrap_*` may be lists of the same length. A single value applies to all prompts,
with two exceptions, as in SGLang: a single `rid` becomes `rid_0, rid_1, ...`, and a single `bootstrap_room` is the room
of the first prompt and counts up.

The first sample of a prompt has the prompt's `rid`; further samples (`n`) are the requests `rid_1, rid_2, ...`. They
share its prefill and its room. A router may send a room for every sample: then the first room of each prompt is used.
"""

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from ....common.errors import UnavailableError
from ....common.words import counted, shown
from ....configs.schema import AnyServerConfig, PrefillConfig
from ....scheduler.messages.frontend import Submit
from .fields import (
    Body,
    Characters,
    FieldError,
    Integer,
    Number,
    OneOrEach,
    Text,
    Within,
    check_within,
    optional,
    problem,
)
from .limits import Limits

DEFAULT_BOOTSTRAP_PORT = 8998
MAX_RID_CHARACTERS = 256
MAX_HOST_CHARACTERS = 255
MAX_ROOM = (1 << 63) - 1
MAX_PRIORITY = 100
MAX_TIMEOUT_S = 86_400
MAX_SLO_MS = 3_600_000

ValueT = TypeVar("ValueT")


def _check_printable(rid: str) -> str:
    if not rid.isprintable():
        raise problem("must not contain control characters")
    return rid


def _check_host(host: str) -> str:
    if re.search(r"[\s:/]", host):
        raise problem(f"must be a host name or an IPv4 address, got {shown(host)}")
    return host


Rid = Annotated[Text, Characters(MAX_RID_CHARACTERS), AfterValidator(_check_printable)]
Host = Annotated[Text, Characters(MAX_HOST_CHARACTERS), AfterValidator(_check_host)]
Slo = Annotated[Number, Within(1, MAX_SLO_MS)]
TimeoutS = Annotated[Number, Within(0, MAX_TIMEOUT_S, above=True)]


@dataclass(frozen=True, slots=True)
class CallShape:
    """How many prompts a call holds, whether they came as a list, and how many samples each prompt has."""

    prompts: int
    batched: bool
    samples: int

    def spread(self, value: ValueT | list[ValueT], name: str, *, per_sample: bool = False) -> list[ValueT]:
        """Returns a value for each prompt, from a field that is a single value or a list."""
        return self.listed(value, name, per_sample=per_sample) if isinstance(value, list) else [value] * self.prompts

    def listed(self, value: list[ValueT], name: str, *, per_sample: bool = False) -> list[ValueT]:
        """Returns the values of a list, which must have one for each prompt. With `per_sample` it may instead have one
        for each sample: then the first value of each prompt is returned.
        """
        if per_sample and self.samples > 1 and len(value) == self.prompts * self.samples:
            return value[:: self.samples]
        if not self.batched or len(value) != self.prompts:
            held = counted(self.prompts, "prompt") if self.batched else "a single prompt"
            raise FieldError(name, f"is an array of {len(value)} but the call holds {held}")
        return value


class RoutingFields(Body):
    rid: OneOrEach[Rid | None] = optional(
        "Id of the request, for /abort_request. For a list of prompts: a list of ids, or one prefix for all ids. "
        "Default: random."
    )
    priority: Annotated[Integer, Within(-MAX_PRIORITY, MAX_PRIORITY)] | None = optional(
        "Higher first, on decode and on prefill. Default 0."
    )
    slo_ttft_ms: Slo | None = optional(
        "The first token should come within so many milliseconds. Default: slo_ttft_ms of the server, or "
        "fewer for a short prompt."
    )
    slo_itl_ms: Slo | None = optional(
        "Longest time between tokens while the server computes prompts, in milliseconds. Default: the server's."
    )
    timeout_s: TimeoutS | None = optional(
        "Seconds until the request fails with 504. The server's request_timeout_s applies as well."
    )
    timeout: TimeoutS | None = optional("Another name of `timeout_s`.")
    bootstrap_host: OneOrEach[Host | None] = optional("The prefill server that a router has chosen.")
    bootstrap_port: OneOrEach[Annotated[Integer, Within(1, 65535)] | None] = optional(
        f"Its control port. Default {DEFAULT_BOOTSTRAP_PORT}."
    )
    bootstrap_room: OneOrEach[Annotated[Integer, Within(0, MAX_ROOM)] | None] = optional(
        "The router's id of the request, the same on prefill and decode."
    )

    def submits(
        self, shape: CallShape, limits: Limits, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[Sequence[Submit], str | None]:
        """Returns a message for each prompt, with default sampling, and the id of the whole call: the single `rid` of a
        list of prompts, otherwise None.
        """
        rids, group = self._rids(shape)
        endpoints, rooms = self._endpoints(shape, limits), self._rooms(shape)
        submits = [
            Submit(
                rid=rid,
                prompt_ids=prompt,
                sampling=limits.default_sampling,
                more_rids=tuple(f"{rid}_{sample}" for sample in range(1, shape.samples)),
                endpoint=endpoint,
                room=room,
                priority=self.priority or 0,
                slo_ttft_ms=self.slo_ttft_ms,
                slo_itl_ms=self.slo_itl_ms,
                timeout_s=self.timeout if self.timeout_s is None else self.timeout_s,
            )
            for rid, prompt, endpoint, room in zip(rids, prompts, endpoints, rooms, strict=True)
        ]
        return submits, group

    def _rids(self, shape: CallShape) -> tuple[Sequence[str], str | None]:
        if isinstance(self.rid, list):
            return [rid or new_rid() for rid in shape.listed(self.rid, "rid")], None
        rid = self.rid or new_rid()
        return ([f"{rid}_{index}" for index in range(shape.prompts)], rid) if shape.batched else ([rid], None)

    def _rooms(self, shape: CallShape) -> Sequence[int | None]:
        first = self.bootstrap_room
        if first is None:
            return [None] * shape.prompts
        if isinstance(first, int):
            check_within(first, "bootstrap_room", 0, MAX_ROOM - shape.prompts + 1)
            return range(first, first + shape.prompts)
        rooms = shape.listed(first, "bootstrap_room", per_sample=True)
        named = [room for room in rooms if room is not None]
        if len(set(named)) < len(named):
            raise FieldError("bootstrap_room", "has the same room twice; each prompt needs its own room")
        return rooms

    def _endpoints(self, shape: CallShape, limits: Limits) -> Sequence[str | None]:
        """HOST:PORT of the prefill server a router chose for each prompt."""
        hosts = shape.spread(self.bootstrap_host, "bootstrap_host", per_sample=True)
        ports = shape.spread(self.bootstrap_port, "bootstrap_port", per_sample=True)
        for host in hosts:
            if host is not None and limits.bootstrap_hosts.allows(host) is False:
                raise FieldError(
                    "bootstrap_host",
                    f"{host} is not a host this server may connect to: name it, or its network, in --bootstrap-allow",
                )
        return [
            None if host is None else f"{host}:{port or DEFAULT_BOOTSTRAP_PORT}"
            for host, port in zip(hosts, ports, strict=True)
        ]


def check_rooms(submits: Iterable[Submit]) -> None:
    """Raises FieldError for a prompt without a room, on a prefill server: a room shows that a router has sent the
    prompt to a decode server, too.
    """
    if any(submit.room is None for submit in submits):
        raise FieldError(
            "bootstrap_room",
            "is required for every prompt: a prefill server computes prompts only for decode servers; "
            "send requests without bootstrap_room to the decode server",
        )


def check_addressed_role(
    host: str | None, submits: Iterable[Submit], config: AnyServerConfig, former: AnyServerConfig | None
) -> None:
    """Raises UnavailableError for a request of a router that does not know yet that this server has switched its role.
    `host` is the one that the request was sent to.

    A router sends each request to a prefill and to a decode server. The request names the prefill server, by the host
    to which the router sends it. Without this check, a server that has become prefill would answer a request for decode
    with an empty text.
    """
    if former is None:
        return
    prefill = config if isinstance(config, PrefillConfig) else former
    assert isinstance(prefill, PrefillConfig)
    own = {f"{name}:{prefill.bootstrap_port}" for name in (host, prefill.public_host)}
    for submit in submits:
        if submit.endpoint is not None and (submit.endpoint in own) != (config.role == "prefill"):
            raise UnavailableError(
                f"this server has switched from {former.role} to {config.role}: "
                f"the request is for its former role (prefill server {submit.endpoint})"
            )


def new_rid() -> str:
    return uuid.uuid4().hex
