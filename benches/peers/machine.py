"""The machine's own account of itself, from /proc; needs nothing but Python."""

import os


def cpu_name() -> str:
    """The processor's model name and those of its matrix and vector extensions that matter to GEMM."""
    fields = {}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", "").split()
    extensions = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    return f"{fields.get('model name', 'unknown')} ({', '.join(extensions)})"


def busy_seconds() -> float:
    """Seconds that all processors together have worked since the machine started, or were kept from it by its host."""
    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, file.readline().split()[1:9])
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


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
