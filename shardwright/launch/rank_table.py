"""Rank tables: the JSON file, version 1.0, in which a cluster of Ascend devices assigns ranks to devices.

Ranks count from 0 without a gap. All ranks of one server come before those of the next, in the order of the servers'
ids as text (``"10.0.0.10"`` comes before ``"10.0.0.9"``). Within a server ranks may be on devices in any order.

Example: two servers, "10.0.0.9" and "10.0.0.10", with one device each. The device of "10.0.0.10" has rank 0, and that
of "10.0.0.9" rank 1; the other way round is an error that names the entry.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NoReturn

from ..errors import SettingError
from ..json_files.json_reader import MIB, kind_of, read_object, short

__all__ = ["MOST", "RankTable", "TableDevice", "cut", "whole_number"]

#: The largest number that a variable or a rank table may hold.
MOST = 999_999_999


def whole_number(text: str) -> int | None:
    """The number from 0 to `MOST` that a text is; None where it is something else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(MOST)) else None


def cut(text: str) -> str:
    """A text for a message: at most 200 characters, none of which moves the cursor."""
    text = text if len(text) <= 200 else f"{text[:197]}..."
    return text if text.isprintable() else repr(text)


VERSION = "1.0"
READY = "completed"  # any other ``status``, such as "initializing", means a table that is not yet whole


@dataclass(frozen=True)
class TableDevice:
    """One entry of a rank table.

    Args:
        rank: the rank.
        server: the id of its server, usually the server's address.
        device: the index of the device on its server.
        ip: the address of that device's own network.
    """

    rank: int
    server: str
    device: int
    ip: str


@dataclass(frozen=True)
class RankTable:
    """A rank table without faults.

    Args:
        path: the file.
        devices: its entries, by rank.
        digest: a hash of the file's text, so that ranks can check that they were given the same one.
    """

    path: str
    devices: tuple[TableDevice, ...]
    digest: str

    @classmethod
    def read(cls, path: str) -> RankTable:
        """Read and check a table.

        Raises:
            SettingError: the entry at fault, and the legal values there.
        """
        legal = (
            "RANK_TABLE_FILE: the path of a rank table, an object with version, server_count, server_list and status"
        )
        text, table = read_object(path, SettingError, "the rank table", legal, 64 * MIB)
        return cls(path, _Reading(path).devices(table), hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def servers(self) -> tuple[str, ...]:
        """The ids of the servers, in the order of their ranks."""
        return tuple(dict.fromkeys(device.server for device in self.devices))

    def beside(self, rank: int) -> tuple[TableDevice, ...]:
        """The entries of the server of this rank, by rank."""
        return tuple(device for device in self.devices if device.server == self.devices[rank].server)


class _Reading:
    """One pass over a table; every fault is raised with its entry."""

    def __init__(self, path: str) -> None:
        self._path = path

    def devices(self, table: dict[str, object]) -> tuple[TableDevice, ...]:
        version = self._field(table, "the table", "version", "1.0")
        if version != VERSION:
            self._fault("version", f"unknown version {short(version)}", f'"{VERSION}"')
        status = self._field(table, "the table", "status", READY)
        if status != READY:
            self._fault("status", f"{short(status)}: the table is not whole", f'"{READY}"')
        servers = self._list(table, "the table", "server_list")
        count = self._number(table, "the table", "server_count", str(len(servers)))
        if count != len(servers):
            self._fault("server_count", f"{count}, but server_list has {len(servers)}", f'"{len(servers)}"')

        found: dict[int, tuple[TableDevice, str]] = {}  # by rank: the device, and its place in the file
        ids: dict[str, str] = {}
        for index, server in enumerate(servers):
            self._server(server, f"server_list[{index}]", ids, found)
        for rank in range(len(found)):
            if rank not in found:
                highest, where = max(found), found[max(found)][1]
                self._fault(
                    where,
                    f"rank_id {highest}, but no device has rank_id {rank}",
                    f"each of 0 to {len(found) - 1} once, for {len(found)} devices",
                )
        devices = [found[rank] for rank in range(len(found))]
        for (before, _), (device, where) in zip(devices, devices[1:]):
            if device.server < before.server:
                self._fault(
                    where,
                    f"rank_id {device.rank} comes after rank {before.rank} of server {cut(before.server)}, "
                    f"whose id is the greater text",
                    f"ranks in the order of the server ids, compared as text: {cut(', '.join(sorted(ids)))}",
                )
        return tuple(device for device, _ in devices)

    def _server(
        self, server: object, where: str, ids: dict[str, str], found: dict[int, tuple[TableDevice, str]]
    ) -> None:
        if not isinstance(server, dict):
            self._fault(where, f"it is {kind_of(server)}", "an object with server_id and device")
        name = self._text(server, where, "server_id", "the server's address, such as 10.0.0.1")
        where = f"{where} (server {cut(name)})"
        if name in ids:
            self._fault(
                where, f"server_id {cut(name)} is that of {ids[name]} too", "one entry a server, each with its own id"
            )
        ids[name] = where.split(" ")[0]
        indices: dict[int, str] = {}
        addresses: dict[str, str] = {}
        for index, entry in enumerate(self._list(server, where, "device")):
            place = f"{where}, device[{index}]"
            if not isinstance(entry, dict):
                self._fault(place, f"it is {kind_of(entry)}", "an object with device_id, device_ip and rank_id")
            device = TableDevice(
                rank=self._number(entry, place, "rank_id", "0"),
                server=name,
                device=self._number(entry, place, "device_id", "0"),
                ip=self._text(entry, place, "device_ip", "the address of the device's network"),
            )
            if device.device in indices:
                self._fault(
                    place,
                    f"device_id {device.device} is that of {indices[device.device]} too",
                    "each device of a server once",
                )
            if device.ip in addresses:
                self._fault(
                    place,
                    f"device_ip {cut(device.ip)} is that of {addresses[device.ip]} too",
                    "an address of its own for each device of a server",
                )
            if device.rank in found:
                self._fault(
                    place, f"rank_id {device.rank} is that of {found[device.rank][1]} too", "each rank once, from 0"
                )
            indices[device.device] = addresses[device.ip] = f"device[{index}]"
            found[device.rank] = (device, place)

    def _field(self, entry: dict[str, object], where: str, name: str, example: str) -> object:
        if name not in entry:
            self._fault(where, f"{name} is missing", f'"{name}": "{example}"')
        return entry[name]

    def _list(self, entry: dict[str, object], where: str, name: str) -> list[object]:
        value = self._field(entry, where, name, "[...]")
        if not isinstance(value, list) or not value:
            self._fault(
                f"{where}, {name}",
                "it is empty" if value == [] else f"it is {kind_of(value)}",
                "a list with at least one",
            )
        return value

    def _text(self, entry: dict[str, object], where: str, name: str, legal: str) -> str:
        value = self._field(entry, where, name, "...")
        if not isinstance(value, str) or not value:
            self._fault(f"{where}, {name}", "it is empty" if value == "" else f"it is {kind_of(value)}", legal)
        return value

    def _number(self, entry: dict[str, object], where: str, name: str, example: str) -> int:
        value = self._field(entry, where, name, example)
        found = whole_number(value) if isinstance(value, str) else value
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MOST:
            return found
        self._fault(
            f"{where}, {name}", f"{short(value)} is not a whole number from 0 to {MOST:,}", f'such as "{example}"'
        )

    def _fault(self, where: str, message: str, legal: str) -> NoReturn:
        raise SettingError(f"{where}: {message}", source=self._path, legal=legal)
