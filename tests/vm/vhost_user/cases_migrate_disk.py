"""Live migration of a guest with its disk, between two hosts that share nothing: two network
namespaces, `ringdisk ctl mirror` over NBD with TLS, and `serve --incoming`. The commands are those
of docs/virtual-machines.md."""

import os

import daemon
import processes
from cases_migrate import Migrate
from daemon import Daemon
from images import sound
from processes import output, require, until
from results import case

SIZE = "512M"


def certificates(directory):
    """An authority, and certificates for `localhost` in the layout that QEMU uses."""
    os.mkdir(directory)
    run = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    run += ["-noenc", "-days", "2"]
    authority = [os.path.join(directory, name) for name in ("ca-key.pem", "ca-cert.pem")]
    usage = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign"]
    output(*run, "-subj", "/CN=authority", *usage, "-keyout", authority[0], "-out", authority[1])
    for name in ("server", "client"):
        key, cert = (os.path.join(directory, f"{name}-{what}.pem") for what in ("key", "cert"))
        signed = ["-CA", authority[1], "-CAkey", authority[0]]
        more = ["-addext", "subjectAltName=DNS:localhost"]
        more += ["-addext", "basicConstraints=critical,CA:FALSE"]
        more += ["-addext", "extendedKeyUsage=serverAuth,clientAuth"]
        output(*run, *signed, *more, "-subj", f"/CN={name}", "-keyout", key, "-out", cert)


class MigrateDisk(Migrate):
    """One guest, wherever it is, and its image there."""

    name = "migrate_disk"

    def setup(self):
        number = os.getpid()
        self.spaces = [f"ringdisk-vm-{side}-{number}" for side in "ab"]
        links = [f"rv{side}{number}" for side in "ab"]
        for space in self.spaces:
            output("ip", "netns", "add", space)
        peer = ["type", "veth", "peer", "name", links[1], "netns", self.spaces[1]]
        output("ip", "link", "add", links[0], "netns", self.spaces[0], *peer)
        for at, (space, link) in enumerate(zip(self.spaces, links)):
            output("ip", "-n", space, "address", "add", f"10.213.1.{at + 1}/30", "dev", link)
            output("ip", "-n", space, "link", "set", link, "up")
        self.certificates = os.path.join(self.context.directory, "certificates")
        certificates(self.certificates)
        self.images = []
        super().setup()

    def teardown(self):
        try:
            super().teardown()
        finally:
            for space in self.spaces:
                output("ip", "netns", "delete", space, expect=None)

    def _daemon(self):
        """A daemon on the next host, with an image of its own."""
        self.image = os.path.join(self.context.directory, f"disk{self.moves + 1}.qcow2")
        output("qemu-img", "create", "-q", "-f", "qcow2", self.image, SIZE)
        made = super()._daemon()
        made.options += ["--allow-path", self.certificates]
        made.prefix = ["ip", "netns", "exec", self.spaces[(self.moves + 1) % 2]]
        return made

    def _takes(self, there):
        """A process on the other host that takes the copy. Gives it, and its address."""
        host = there.prefix[-1]
        address = f"10.213.1.{self.spaces.index(host) + 1}"
        words = ["--nbd", f"{address}:10809", "--tls-creds", self.certificates]
        log = os.path.join(self.context.directory, f"nbd{self.moves}.log")
        process = processes.start(
            [*there.prefix, daemon.PROGRAM, "serve", there.image, *words], log
        )
        listens = ["ip", "netns", "exec", host, "ss", "-Hltn", "sport", "=", "10809"]
        until(lambda: output(*listens).strip(), 30, "the NBD server listens")
        return process, address

    def _move(self):
        mark = f"disk{self.moves}"
        self.machine.run(
            f"printf '%-512s' {mark} | dd of={self.dev} bs=512 seek=900000 oflag=direct"
        )
        job = self._load()
        there, machine = self._destination()
        takes, address = self._takes(there)
        uri = f"nbds://{address}/?tls-certificates={self.certificates}&tls-hostname=localhost"
        here = self.daemon
        here.ctl("mirror", uri, "--format", "raw", "--write-blocking", "--name", "move")
        self._begin(machine, pause=True)
        self._wait_for("pre-switchover")
        here.job("cancel", "move")
        here.job("wait", "move")
        code = processes.kill(takes, processes.signal.SIGTERM)
        require(code == 0, f"the NBD server ended with status {code}")
        self.machine.monitor.command("migrate-continue", state="pre-switchover")
        self._wait_for("completed")
        until(
            lambda: machine.monitor.command("query-status")["status"] == "running",
            30,
            "the destination runs",
        )
        old_machine = self.machine
        self.machine, self.daemon = machine, there
        old_machine.kill()
        here.stop()
        self._goes_on(job)
        found = self.machine.run(
            f"dd if={self.dev} bs=512 count=1 skip=900000 iflag=direct 2>/dev/null"
        ).strip()
        require(found == mark, f"the destination reads {found!r} where the source wrote {mark!r}")
        sound(here.image)

    @case
    def under_load_over_nbd_with_tls(self):
        self._move()

    @case
    def and_back(self):
        self._move()
