"""The machine's own account of itself, from /proc; needs nothing but Python."""

import os
import statistics
import time
from collections.abc import Callable

# A run during which others had more than this share of the processors is made again, so many times at most.
MOST_OF_OTHERS = 0.05
TRIES = 3


def cpu_fields() -> dict[str, str]:
    """What /proc/cpuinfo says of the first processor."""
    fields = {}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_flags() -> list[str]:
    """The processor's features, as Linux names them."""
    return cpu_fields().get("flags", "").split()


def cpu_name() -> str:
    """The processor's model name, family and model, and those of its matrix and vector extensions that matter to GEMM."""
    fields = cpu_fields()
    flags = fields.get("flags", "").split()
    extensions = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    number = f"family {fields['cpu family']}, model {fields['model']}; " if "cpu family" in fields and "model" in fields else ""
    return f"{fields.get('model name', 'unknown')} ({number}{', '.join(extensions)})"


def spread(values: list[float], digits: int = 0) -> str:
    """Median, minimum and maximum of rounds: `2743 (2700 to 2790)`."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def by_turns(number: int, engines: list) -> list:
    """The order of engines in a round: each round begins with the next one, so that none always runs first."""
    first = number % len(engines)
    return engines[first:] + engines[:first]


def busy_seconds() -> float:
    """Seconds that all processors together have worked since the machine started, or were kept from it by its host."""
    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, file.readline().split()[1:9])
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Seconds that the processes which this one has started and waited for have worked."""
    times = os.times()
    return times.children_user + times.children_system


def undisturbed(execute: Callable[[], dict]) -> dict:
    """The engine's document with the share that others had of the processors (`others`): of the first of up to three runs in which
    that was little, or else of the quietest."""
    quietest = None
    for _ in range(TRIES):
        begin, own, busy = time.monotonic(), children_seconds(), busy_seconds()
        result = execute()
        of_others = (busy_seconds() - busy) - (children_seconds() - own)
        share = max(0.0, of_others) / (max(1e-9, time.monotonic() - begin) * (os.cpu_count() or 1))
        if quietest is None or share < quietest["others"]:
            quietest = {**result, "others": share}
        if share <= MOST_OF_OTHERS:
            break
    return quietest


def peak_rss_bytes() -> int:
    """The highest resident set of this process so far (not of its parent, unlike getrusage after a fork)."""
    with open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def proportional_bytes() -> int:
    """This process's memory now: its own pages, and its part of each that it shares with others (PSS)."""
    return resident_sizes()["Pss"]


def peak_own_bytes() -> int:
    """`peak_rss_bytes` without what other processes answer for of the pages that are shared with them now."""
    sizes = resident_sizes()
    return peak_rss_bytes() - (sizes["Rss"] - sizes["Pss"])


def resident_sizes() -> dict[str, int]:
    """Rss and Pss of this process, in bytes."""
    sizes = {}
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key in ("Rss", "Pss"):
                sizes[key] = int(value.split()[0]) * 1024
    return sizes
