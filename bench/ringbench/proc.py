"""What the kernel counts about a process: CPU time, memory, context switches. Reads /proc only;
never changes anything.
"""

import os
import time

TICK = os.sysconf("SC_CLK_TCK")


def tree(pid):
    """The process and all its descendants, parents first."""
    out, todo = [], [pid]
    while todo:
        current = todo.pop()
        out.append(current)
        try:
            for task in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{task}/children") as f:
                    todo += [int(word) for word in f.read().split()]
        except OSError:
            pass
    return out


def cpu_seconds(pid):
    """User and system time of the process tree, threads that ended included; in ticks of 10 ms."""
    total = 0
    for each in tree(pid):
        try:
            with open(f"/proc/{each}/stat") as f:
                fields = f.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        except OSError:
            pass
    return total / TICK


def threads(pid):
    """Thread ids of the process tree."""
    out = []
    for each in tree(pid):
        try:
            out += [(each, int(task)) for task in os.listdir(f"/proc/{each}/task")]
        except OSError:
            pass
    return out


def run_ns(pid):
    """Time on a CPU in ns of the threads that are alive (finer than ticks, blind to threads that
    ended).
    """
    total = 0
    for process, thread in threads(pid):
        try:
            with open(f"/proc/{process}/task/{thread}/schedstat") as f:
                total += int(f.read().split()[0])
        except OSError:
            pass
    return total


def clock_seconds(pid):
    """CPU time of one process in seconds, to the ns, threads that ended included."""
    # As clock_getcpuclockid(3) makes it.
    return time.clock_gettime((~pid << 3) | 2)


def switches(pid):
    """Context switches of the threads that are alive."""
    total = 0
    for process, thread in threads(pid):
        try:
            with open(f"/proc/{process}/task/{thread}/status") as f:
                total += sum(int(line.split()[1]) for line in f if "ctxt_switches" in line)
        except OSError:
            pass
    return total


def rss_mib(pid):
    """Resident memory of the process tree in MiB (VmRSS: shared library pages count in full)."""
    total = 0
    for each in tree(pid):
        try:
            with open(f"/proc/{each}/status") as f:
                total += sum(int(line.split()[1]) for line in f if line.startswith("VmRSS"))
        except OSError:
            pass
    return total / 1024


def own_mib(pid):
    """Resident memory of the process in MiB that is not shared (RssAnon and RssFile): without the
    memory of a guest.
    """
    with open(f"/proc/{pid}/status") as f:
        return (
            sum(int(line.split()[1]) for line in f if line.startswith(("RssAnon", "RssFile")))
            / 1024
        )


def machine_busy_seconds():
    """CPU time of the whole machine that was not idle."""
    with open("/proc/stat") as f:
        fields = [int(word) for word in f.readline().split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / TICK


def mounted(path):
    """Whether something is mounted exactly at `path`."""
    wanted = os.path.realpath(path)
    with open("/proc/self/mounts") as f:
        return any(line.split()[1].replace("\\040", " ") == wanted for line in f)
