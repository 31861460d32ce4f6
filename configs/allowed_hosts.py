"""Hosts that a request may name as `bootstrap_host`, so that a decode server connects to them."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

ANY = "*"
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")


def check_entry(entry: str) -> str:
    """A host name, `*.DOMAIN`, an address, a network as ADDRESS/BITS, or `*`. Raises ValueError."""
    if entry == ANY:
        return entry
    if "/" in entry:
        ipaddress.ip_network(entry)
    elif not entry or any(character.isspace() for character in entry) or "*" in entry.removeprefix("*."):
        raise ValueError(f"{entry!r} is not a host name, *.DOMAIN, address, network (10.0.0.0/8) or *")
    return entry


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Made from entries that `check_entry` accepted."""

    names: frozenset[str] = frozenset()
    domains: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    any_host: bool = False

    @classmethod
    def of(cls, entries: Iterable[str]) -> "AllowedHosts":
        given = list(entries)
        return cls(
            names=frozenset(entry.lower() for entry in given if "/" not in entry and "*" not in entry),
            domains=tuple(entry[1:].lower() for entry in given if entry.startswith("*.")),
            networks=tuple(ipaddress.ip_network(entry) for entry in given if "/" in entry),
            any_host=ANY in given,
        )

    def allows(self, host: str) -> bool | None:
        """Whether `host`, as a request names it, is allowed; None if that depends on its resolved address."""
        name = host.lower()
        if self.any_host or name in self.names or name.endswith(self.domains):
            return True
        if (address := _address(host)) is not None:
            return self._in_networks(address)
        return None if self.networks else False

    def allows_at(self, host: str, address: str) -> bool:
        """Whether `host`, which resolves to `address`, is allowed."""
        allowed = self.allows(host)
        parsed = _address(address)
        return allowed if allowed is not None else parsed is not None and self._in_networks(parsed)

    def _in_networks(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return any(address in network for network in self.networks)


ANY_HOST = AllowedHosts(any_host=True)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
