"""The address of this machine for its peers (`--advertise-host auto`)."""

import ipaddress
import socket


def own_address() -> str:
    """The IPv4 address of this machine's host name: in a container or a pod, its own. Raises ValueError with the reason
    if peers cannot use it.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(f"the host name {name} of this machine has no address: {error}") from None
    if ipaddress.ip_address(address).is_loopback:
        raise ValueError(f"the host name {name} of this machine has the address {address}, where peers cannot reach it")
    return address
