"""Processes of a test: whatever happens, none of them outlives it."""

import ctypes
import os
import signal
import subprocess
import time

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
# What was started, so that the end of the run can end it.
_all = []


class Failure(Exception):
    """A test failed; the text says what was expected and what was seen."""


def require(condition, text):
    """Fails the test with `text` unless `condition` holds."""
    if not condition:
        raise Failure(text)


def _ends_with_us():
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(argv, log, **more):
    """Starts a process whose output goes to the file `log`; it dies with us."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=more.pop("stdout", out),
            stderr=out,
            preexec_fn=_ends_with_us,
            **more,
        )
    _all.append(process)
    return process


def kill(process, how=signal.SIGKILL):
    """Ends a process at once and waits until it has gone."""
    if process.poll() is None:
        process.send_signal(how)
    try:
        code = process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise Failure(f"process {process.pid} did not end by signal {how}") from None
    if process in _all:
        _all.remove(process)
    return code


def kill_all():
    """Ends all that was started and still runs."""
    for process in list(_all):
        kill(process)


def output(*argv, expect=0):
    """What a command of the host printed; fails the test when its exit status is not `expect`
    (None: any).
    """
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    if expect is not None and done.returncode != expect:
        raise Failure(
            f"{' '.join(argv)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def until(condition, limit_s, what):
    """Waits until `condition()` is true, and returns what it gave."""
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        require(time.monotonic() < end, f"{what}: not within {limit_s} s")
        time.sleep(0.05)


def tail(path, lines=30):
    """The end of a log."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - 16384))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as e:
        return str(e)
