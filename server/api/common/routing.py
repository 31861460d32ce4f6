"""Which requests a call becomes: their ids, how urgent they are, and which prefill server takes them.

With a list of prompts, `rid` and `bootstrap_*` may be lists of the same length; one value stands for all, except that a
single `rid` becomes `rid_0, rid_1, ...` and a single `bootstrap_room` counts up, as in SGLang. Further samples of a
prompt (`n`) are the requests `rid_1, rid_2, ...` after its own `rid`; they share its prefill and its room. A router may
send a room for every sample: the first of a prompt's rooms is used.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....configs.allowed_hosts import AllowedHosts
from ....configs.words import counted, shown
from .fields import FieldError, Fields, check_integer, check_string
from .limits import Limits

DEFAULT_BOOTSTRAP_PORT = 8998
MAX_RID_CHARACTERS = 256
MAX_HOST_CHARACTERS = 255
MAX_ROOM = (1 << 63) - 1
MAX_PRIORITY = 100
MAX_TIMEOUT_S = 86_400


@dataclass(frozen=True, slots=True)
class Route:
    """The request ids of one prompt, first sample first, and how it is to be served."""

    rid: str
    more_rids: tuple[str, ...] = ()
    endpoint: str | None = None
    room: int | None = None
    priority: int = 0
    timeout_s: float | None = None

    @property
    def rids(self) -> tuple[str, ...]:
        return (self.rid, *self.more_rids)


def read_routes(
    fields: Fields, prompts: int, batched: bool, samples: int, limits: Limits
) -> tuple[Sequence[Route], str | None]:
    """A route for each prompt, and the one id of the whole call where it has one."""
    rids, group = _read_rids(fields, prompts, batched)
    rooms = _read_rooms(fields, prompts, batched, samples)
    endpoints = _read_endpoints(fields, prompts, batched, samples, limits.bootstrap_hosts)
    priority = fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0
    timeout_s = _read_timeout_s(fields)
    routes = [
        Route(
            rid=rids[index],
            more_rids=tuple(f"{rids[index]}_{sample}" for sample in range(1, samples)),
            endpoint=endpoints[index],
            room=rooms[index],
            priority=priority,
            timeout_s=timeout_s,
        )
        for index in range(prompts)
    ]
    return routes, group


def _read_rids(fields: Fields, prompts: int, batched: bool) -> tuple[tuple[str, ...], str | None]:
    given = per_prompt(fields, "rid", prompts, batched)
    if given is not None:
        rids = tuple(new_rid() if rid is None else _check_rid(rid, f"rid[{index}]") for index, rid in enumerate(given))
        return rids, None
    rid = new_rid() if fields.raw("rid") is None else _check_rid(fields.raw("rid"), "rid")
    if not batched:
        return (rid,), None
    return tuple(f"{rid}_{index}" for index in range(prompts)), rid


def _read_rooms(fields: Fields, prompts: int, batched: bool, samples: int = 1) -> tuple[int | None, ...]:
    given = per_prompt(fields, "bootstrap_room", prompts, batched, samples)
    if given is None:
        first = fields.integer("bootstrap_room", 0, MAX_ROOM - prompts + 1)
        return tuple(None if first is None else first + index for index in range(prompts))
    rooms = tuple(
        None if room is None else check_integer(room, f"bootstrap_room[{index}]", 0, MAX_ROOM)
        for index, room in enumerate(given)
    )
    named = [room for room in rooms if room is not None]
    if len(set(named)) < len(named):
        raise fields.error("bootstrap_room", "names a room twice; every prompt needs a room of its own")
    return rooms


def check_rooms(routes: Iterable[Route]) -> None:
    """On a prefill server: every prompt is one that a decode server was sent, too."""
    if any(route.room is None for route in routes):
        raise FieldError(
            "bootstrap_room",
            "is required for every prompt: a prefill server computes what a decode server asks for; "
            "send requests without a room to the decode server",
        )


def per_prompt(fields: Fields, field: str, prompts: int, batched: bool, samples: int = 1) -> list[object] | None:
    """The list form of a field that may be one value or one per prompt; None when it is one value.

    With `samples` the list may also have one value per sample, all samples of a prompt together.
    """
    value = fields.raw(field)
    if not isinstance(value, list):
        return None
    if samples > 1 and len(value) == prompts * samples:
        return value[::samples]
    if not batched:
        raise fields.error(field, f"is an array of {len(value)} but the call holds a single prompt")
    if len(value) != prompts:
        raise fields.error(field, f"is an array of {len(value)} but the call holds {counted(prompts, 'prompt')}")
    return value


def new_rid() -> str:
    return uuid.uuid4().hex


def _check_rid(value: object, name: str) -> str:
    rid = check_string(value, name, MAX_RID_CHARACTERS)
    if not rid.isprintable():
        raise FieldError(name, "must not contain control characters")
    return rid


def _read_endpoints(
    fields: Fields, prompts: int, batched: bool, samples: int, allowed_hosts: AllowedHosts
) -> tuple[str | None, ...]:
    """HOST:PORT of the prefill server a router chose for each prompt."""
    hosts = per_prompt(fields, "bootstrap_host", prompts, batched, samples) or [fields.raw("bootstrap_host")] * prompts
    ports = per_prompt(fields, "bootstrap_port", prompts, batched, samples) or [fields.raw("bootstrap_port")] * prompts
    endpoints: list[str | None] = []
    for host, port in zip(hosts, ports, strict=True):
        if host is None:
            endpoints.append(None)
            continue
        name = check_string(host, "bootstrap_host", MAX_HOST_CHARACTERS)
        if any(character.isspace() or character in ":/" for character in name):
            raise FieldError("bootstrap_host", f"must be a host name or an IPv4 address, got {shown(host)}")
        if allowed_hosts.allows(name) is False:
            raise FieldError(
                "bootstrap_host",
                f"{name} is not a host this server may connect to: name it, or its network, in --bootstrap-allow",
            )
        number = DEFAULT_BOOTSTRAP_PORT if port is None else check_integer(port, "bootstrap_port", 1, 65535)
        endpoints.append(f"{name}:{number}")
    return tuple(endpoints)


def _read_timeout_s(fields: Fields) -> float | None:
    """`timeout_s`, or `timeout`; the server's own request_timeout_s holds as well."""
    name = fields.spelling("timeout_s", "timeout")
    if fields.raw(name) is None:
        return None
    return fields.number_within(name, 0, MAX_TIMEOUT_S, default=MAX_TIMEOUT_S, above=True)
