"""The fleet as this gateway sees it: the composition of its parts."""

from __future__ import annotations

import ssl

from sandbox_gateway.config import FleetSection
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import Invalid
from sandbox_gateway.fleet.directory import Directory
from sandbox_gateway.fleet.holds import Holds
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.membership import Membership
from sandbox_gateway.fleet.moves import MoveDirectory
from sandbox_gateway.fleet.peers import Peers
from sandbox_gateway.fleet.run_directory import RunDirectory
from sandbox_gateway.fleet.secret import check_secret_file
from sandbox_gateway.fleet.store import Store, TlsFiles
from sandbox_gateway.fleet.view import FleetView
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import BackgroundTasks

log = Logger("fleet")


class Fleet:
    def __init__(self, settings: FleetSection, engine: Engine) -> None:
        """Create the parts. Raises Invalid if a file of the configuration cannot be used."""
        check_secret_file(settings.secret_file)
        self.settings = settings
        self.server_tls, self.client_tls = _load_tls(settings)
        self._engine = engine
        self.background = BackgroundTasks(log)
        """Work that ends when the gateway leaves the fleet."""
        self._store = Store(settings.etcd, TlsFiles(settings.tls_ca, settings.tls_cert, settings.tls_key))
        keys = Keys(settings.prefix)
        self.view = FleetView(self._store, keys, settings.name)
        self.membership = Membership(settings, engine, self._store, keys, self.view)
        self.directory = Directory(engine, self._store, keys, self.view, self.membership)
        self.holds = Holds(self._store, keys)
        self.moves = MoveDirectory(self._store, keys, self.view)
        self.runs = RunDirectory(self._store, keys, self.membership)
        self.peers = Peers(self.view, self.client_tls)
        self.view.member_listeners.append(self._report_member)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def is_etcd_away(self) -> bool:
        """Whether etcd has not answered the last request, so that the view may lack new objects."""
        return self._store.is_away

    async def open(self) -> None:
        """Join the fleet, after the engine has been opened. Raises Invalid or Conflict if it cannot be joined."""
        await self.membership.join()
        self.directory.attach()
        self._engine.transfers.list_fleet_signers = self._list_signers
        self.background.start(self.membership.keep_alive())
        self.background.start(self.membership.renew_record())
        self.background.start(self.view.follow())
        self.background.start(self.directory.publish_changes())

    async def close(self) -> None:
        """Leave the fleet, after the engine has been closed: until then, its operations need their names."""
        await self.background.cancel()
        await self.runs.close()
        await self.directory.close()
        await self.membership.leave()
        await self.peers.close()
        self._store.close()

    def _list_signers(self) -> list[str]:
        return [host.signer for host in self.view.hosts.values() if host.signer]

    def _report_member(self, name: str, is_member: bool) -> None:
        if name != self.name:
            log.info("a host has joined" if is_member else "a host has gone", host=name)
            self._engine.events.publish("fleet.host_joined" if is_member else "fleet.host_gone", host=name)


def check_files(settings: FleetSection) -> None:
    """Raise Invalid if a file of the configuration cannot be used."""
    check_secret_file(settings.secret_file)
    _load_tls(settings)


def _load_tls(settings: FleetSection) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the server and of the client. Both require a certificate of the fleet's authority."""
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        try:
            context = ssl.create_default_context(purpose, cafile=settings.tls_ca)
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as error:
            raise Invalid(
                f"fleet.tls_ca {settings.tls_ca}, fleet.tls_cert {settings.tls_cert} and fleet.tls_key "
                f"{settings.tls_key} cannot be loaded ({error}): check the three files"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    return contexts[0], contexts[1]
