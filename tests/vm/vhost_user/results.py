"""Runs groups of cases and prints a line for each, as `cargo test` does. The cases of a group share
what its `setup` made, most often one boot of a guest; each works alone too (a filter may leave out
the others)."""

import time
import traceback

import processes
from processes import Failure


def case(function):
    """Marks a method as a case."""
    function.case = "short"
    return function


def full(function):
    """Marks a method as a case that runs with RINGDISK_FULL=1, or when a filter names it."""
    function.case = "full"
    return function


class Group:
    """Cases in the order of their definition. `setup` and `teardown` frame them; `after` is called
    after each case that passed.
    """

    name = ""

    def __init__(self, context):
        self.context = context

    def setup(self):
        """Before the first case."""

    def after(self):
        """Fails a case whose end left something wrong."""

    def recover(self):
        """Called after a case that failed, for the sake of the next."""

    def teardown(self):
        """After the last case, also when one failed."""


class Results:
    """Counts."""

    def __init__(self):
        self.passed, self.failed, self.left_out = 0, [], 0

    def report(self, name, begin, error):
        """One line for a case, after what went wrong with it."""
        if error is None:
            self.passed += 1
            print(f"test {name} ... ok ({time.monotonic() - begin:.1f} s)", flush=True)
            return
        self.failed.append(name)
        if isinstance(error, Failure):
            print(f"---- {name} ----\n{error}")
        else:
            print(f"---- {name} ----\n" + "".join(traceback.format_exception(error)))
        print(f"test {name} ... FAILED", flush=True)

    def run(self, group, filters, everything):
        """Runs the wanted cases of a group."""
        cases = []
        for key, value in vars(type(group)).items():
            kind = getattr(value, "case", None)
            name = f"vhost_user::{group.name}::{key}"
            if kind and (not filters or any(each in name for each in filters)):
                if kind == "full" and not everything and not any(each in key for each in filters):
                    self.left_out += 1
                else:
                    cases.append((name, getattr(group, key)))
        if not cases:
            return
        begin = time.monotonic()
        try:
            group.setup()
        except Exception as e:  # pylint: disable=broad-except
            for name, _ in cases:
                self.report(name, begin, e)
            processes.kill_all()
            return
        print(f"vm: {group.name} is ready after {time.monotonic() - begin:.1f} s", flush=True)
        for name, function in cases:
            begin = time.monotonic()
            error = None
            try:
                function()
                group.after()
            except Exception as e:  # pylint: disable=broad-except
                error = e
            self.report(name, begin, error)
            if error is not None:
                try:
                    group.recover()
                except Exception as e:  # pylint: disable=broad-except
                    print(f"vm: after {name}: {e}", flush=True)
        begin = time.monotonic()
        try:
            group.teardown()
        except Exception as e:  # pylint: disable=broad-except
            self.report(f"vhost_user::{group.name}::ends", begin, e)
        processes.kill_all()

    def summary(self):
        """The last line, and the exit status."""
        for each in self.failed:
            print(f"    {each}")
        word = "FAILED" if self.failed else "ok"
        print(
            f"test result: {word}. {self.passed} passed; {len(self.failed)} failed;"
            f" {self.left_out} ignored",
            flush=True,
        )
        return 1 if self.failed else 0
