"""The peer of a connection: its address, and on this machine its user, as the kernel knows both.

The kernel is asked for the one socket that the connection comes from. /proc/net/tcp has the same data, but it lists
every socket, which takes 10 ms and more.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.client.address import is_loopback

if TYPE_CHECKING:  # commands read settings without the service's packages
    from starlette.datastructures import Headers
    from starlette.types import Scope

Address = tuple[str, int | None]
"""Host and port."""
Proxy = ipaddress.IPv4Network | ipaddress.IPv6Network | int
"""Addresses of other machines, or the id of a user of this one."""

# linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ANY = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI4s16s16sIII")
_REPLY = struct.Struct("=4x4s56xII")
"""The ports, the user and the inode in an inet_diag_msg."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection. `uid` is its user; None for another machine, or if the system does not say."""

    address: str
    uid: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether the peer is the user who runs this process, or root, who has all rights of this user."""
        return self.uid in {0, os.geteuid()}

    def is_among(self, proxies: Collection[Proxy]) -> bool:
        """Return whether the peer is one of `proxies`: on this machine by its user, because users share addresses."""
        if self.uid is not None or is_loopback(self.address):
            return self.uid in proxies
        address = ipaddress.ip_address(self.address)
        return any(not isinstance(proxy, int) and address in proxy for proxy in proxies)

    def forwards_for(self, headers: Headers, proxies: Collection[Proxy]) -> str | None:
        """Return the address of the client for whom this peer forwards; None if it is no proxy, or names no client.

        A proxy adds the address at the end of X-Forwarded-For. The text before it came with the request.
        """
        added = ",".join(headers.getlist("x-forwarded-for")).rpartition(",")[2].strip()
        with suppress(ValueError):
            return str(ipaddress.ip_address(added)) if self.is_among(proxies) else None
        return None


def peer_of(scope: Scope) -> Peer:
    """Return the peer of a request, from `bexp.api.listener`; with another listener, its user is not known."""
    peer: Peer = scope.get("state", {}).get("peer") or Peer((scope["client"] or [""])[0])
    return peer


def find_peer(client: Address | None, server: Address | None) -> Peer:
    """Return the peer at `client` of a connection to `server`, both as this process sees them."""
    if client is None or server is None:
        return Peer("")
    return Peer(client[0].removeprefix("::ffff:"), _find_uid(client, server))


def read_proxy(text: str) -> Proxy:
    """Read an address or a network of other machines, or the name or the id of a user of this one.

    Raises:
        ValueError: `text` is none of these.
    """
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        try:
            return int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid
        except KeyError:
            raise ValueError(f"'{text}' is neither an address nor a user of this machine") from None
    if network.is_loopback:
        raise ValueError(f"every user of this machine has the address {text}; name the user that the proxy runs as")
    return network


def _find_uid(client: Address, server: Address) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
        ports = struct.pack("!HH", client[1], server[1])
        ends = (socket.inet_pton(family, host) for host, _ in (client, server))
        query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, _ANY, ports, *ends, 0, _ANY, _ANY)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(_HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + query)
            reply = kernel.recv(4096, socket.MSG_DONTWAIT)  # it is there when `send` returns
        if _HEADER.unpack_from(reply)[1] != _SOCK_DIAG_BY_FAMILY:
            return None
        replied_ports, uid, inode = _REPLY.unpack_from(reply, _HEADER.size)
    except (OSError, struct.error):
        return None
    # Without such a connection, the kernel replies with a socket that listens at `client`, whose other port is 0. A
    # socket that its process has closed may count as root's; it has no inode.
    return int(uid) if replied_ports == ports and inode else None
