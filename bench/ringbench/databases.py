"""Databases as clients: a file system on a loop device on a mount, and bulk loads into it."""

import glob
import multiprocessing
import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
import time

from .servers import BenchError

CACHE = os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ringdisk", "postgresql"
)
PACKAGES = "postgresql-{0} postgresql-client-{0} libpq5"


def call(*command, **more):
    """Runs a command; an error has its last words."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **more)
    if done.returncode:
        raise BenchError(f"{' '.join(command[:3])}…: {(done.stderr + done.stdout).strip()[-400:]}")
    return done.stdout.strip()


def together(writers):
    """Runs processes side by side to their end."""
    for each in writers:
        each.start()
    for each in writers:
        each.join(300)
        if each.exitcode != 0:
            raise BenchError(f"a writer ended with {each.exitcode}")


class Filesystem:
    """ext4 on a loop device on the served file, mounted; gone afterwards."""

    def __init__(self, disk, workdir):
        self.disk, self.workdir, self.loop, self.root = disk, workdir, None, None

    def __enter__(self):
        try:
            self.loop = call("losetup", "--find", "--show", "--direct-io=on", self.disk)
            call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", self.loop)
            self.root = tempfile.mkdtemp(prefix="ext4-", dir=self.workdir)
            call("mount", self.loop, self.root)
            os.chmod(self.root, 0o777)
        except BaseException:
            self.__exit__()
            raise
        return self.root

    def __exit__(self, *_):
        if self.root:
            for _ in range(20):
                subprocess.run(["umount", self.root], capture_output=True)
                if not os.path.ismount(self.root):
                    break
                time.sleep(0.5)
            else:
                # Better than a file system that stays on a disk that goes.
                subprocess.run(["umount", "-l", self.root], capture_output=True)
            if not os.path.ismount(self.root):
                os.rmdir(self.root)
        if self.loop:
            subprocess.run(["losetup", "-d", self.loop], capture_output=True)


def fill(path, rows):
    """One writer: a database of its own, 1000 rows in each transaction, an index at the end."""
    base = sqlite3.connect(path, isolation_level=None)
    base.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, a TEXT, b BLOB)")
    for start in range(0, rows, 1000):
        base.execute("BEGIN")
        base.executemany(
            "INSERT INTO t VALUES (?, ?, ?)",
            (
                (k, f"row {k}", k.to_bytes(8, "little") * 25)
                for k in range(start, min(rows, start + 1000))
            ),
        )
        base.execute("COMMIT")
    base.execute("CREATE INDEX i ON t (a)")
    base.close()


class Sqlite:
    """A database file for each writer."""

    name = "SQLite"

    def __init__(self, root, quick):
        self.root, self.rows = root, 20_000 if quick else 400_000

    def load(self, writers):
        """Seconds until the same number of rows is there, by so many writers, and durable."""
        paths = [os.path.join(self.root, f"{number}.db") for number in range(writers)]
        start = time.monotonic()
        running = [
            multiprocessing.Process(target=fill, args=(path, self.rows // writers))
            for path in paths
        ]
        together(running)
        os.sync()
        seconds = time.monotonic() - start
        for path in paths:
            base = sqlite3.connect(path)
            found = base.execute("SELECT count(*) FROM t").fetchone()[0]
            is_sound = base.execute("PRAGMA quick_check").fetchone()[0] == "ok"
            # An open file would keep the file system mounted.
            base.close()
            if found != self.rows // writers or not is_sound:
                raise BenchError(f"{found} rows of {self.rows // writers} in {path}")
        return seconds


def postgres_tree():
    """Directories of the programs and of the library, from this machine or from packages that are
    unpacked in the cache.
    """
    for root in ("", os.path.join(CACHE, "root")):
        for programs in sorted(glob.glob(f"{root}/usr/lib/postgresql/*/bin"), reverse=True):
            if os.path.exists(os.path.join(programs, "initdb")) and os.path.exists(
                os.path.join(programs, "psql")
            ):
                return programs, glob.glob(f"{root}/usr/lib/*-linux-gnu")[0] if root else ""
    if os.path.isdir(CACHE):
        raise BenchError(f"{CACHE} is incomplete: remove it")
    found = call("apt-cache", "search", "--names-only", r"^postgresql-[0-9]+$").splitlines()
    if not found:
        raise BenchError("no package postgresql-N; see `apt-get update`")
    version = max(int(name.split()[0].split("-")[1]) for name in found)
    os.makedirs(CACHE)
    try:
        call("apt-get", "download", *PACKAGES.format(version).split(), cwd=CACHE)
        for package in glob.glob(os.path.join(CACHE, "*.deb")):
            call("dpkg", "-x", package, os.path.join(CACHE, "root"))
    except BaseException:
        shutil.rmtree(CACHE, ignore_errors=True)
        raise
    return postgres_tree()


class Postgres:
    """One server, a table for each writer."""

    name = "PostgreSQL"

    def __init__(self, root, quick):
        self.root, self.rows = root, 50_000 if quick else 1_000_000
        self.programs, libraries = postgres_tree()
        self.environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "LC_ALL": "C", "TZ": "UTC"}
        self.user = pwd.getpwnam("nobody")

    def run(self, program, *args, **more):
        """A program of PostgreSQL, which refuses to be root."""
        words = (
            [
                "setpriv",
                f"--reuid={self.user.pw_uid}",
                f"--regid={self.user.pw_gid}",
                "--clear-groups",
            ]
            if os.getuid() == 0
            else []
        )
        return call(
            *words,
            os.path.join(self.programs, program),
            *args,
            env=self.environment,
            cwd="/",
            **more,
        )

    def load(self, writers):
        """Seconds until the same number of rows is there, by so many writers, and durable."""
        data = os.path.join(self.root, "data")
        # Names of sockets are short.
        sockets = tempfile.mkdtemp(prefix="pg-", dir="/tmp")
        os.chmod(sockets, 0o777)
        try:
            self.run("initdb", "-D", data, "-A", "trust", "-U", "bench", "--no-sync")
            options = (
                f"-c listen_addresses= -c unix_socket_directories={sockets} -c max_wal_size=4GB -c"
                " autovacuum=off -c jit=off"
            )
            self.run(
                "pg_ctl",
                "-D",
                data,
                "-w",
                "-l",
                os.path.join(self.root, "pg.log"),
                "-o",
                options,
                "start",
            )
            try:
                return self.fill(sockets, writers)
            finally:
                self.run("pg_ctl", "-D", data, "-w", "-m", "fast", "stop")
        finally:
            shutil.rmtree(sockets, ignore_errors=True)

    def fill(self, sockets, writers):
        """The load itself: 10,000 rows in each transaction, an index at the end, a checkpoint."""
        share = self.rows // writers
        psql = (
            "psql",
            "-h",
            sockets,
            "-U",
            "bench",
            "-d",
            "postgres",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
        )
        start = time.monotonic()
        running = []
        for number in range(writers):
            script = [f"CREATE TABLE t{number} (k bigint, a text, b text);"]
            script += [
                f"INSERT INTO t{number} SELECT g, 'row ' || g, repeat(md5(g::text), 5) FROM"
                f" generate_series({at}, {min(share, at + 10_000) - 1}) g;"
                for at in range(0, share, 10_000)
            ]
            script.append(f"CREATE INDEX ON t{number} (k);")
            running.append(
                multiprocessing.Process(
                    target=self.run, args=psql, kwargs={"input": "\n".join(script)}
                )
            )
        together(running)
        self.run(*psql, "-c", "CHECKPOINT")
        seconds = time.monotonic() - start
        found = sum(
            int(self.run(*psql, "-c", f"SELECT count(*) FROM t{number}"))
            for number in range(writers)
        )
        if found != share * writers:
            raise BenchError(f"{found} rows of {share * writers}")
        return seconds
