"""The kernels that both engines take on this CPU, printed with every comparison; a peer below the CPU's AVX-512 is refused.

PyTorch's f32 products are MKL's, its bf16 products and convolutions oneDNN's, the rest its own (ATen). MKL takes its AVX-512
kernels on Intel's processors only: on AMD's they are as fast as on Intel's if `mkl_on_amd.c` is preloaded (`--mkl-as-on-intel`).
MKL's banner does not name them there, so the function that MKL asks is asked as well.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from machine import cpu_flags, cpu_name

HERE = Path(__file__).resolve().parent
REFUSED = 2
PROBE_LIMIT_S = 120

# One small product of each kind, in a process of its own: the libraries choose their kernels once.
PROBE = """
import ctypes, json, os, time, torch
torch.set_num_threads(1)
a = torch.rand(1024, 1024).sub_(0.5)
b = a.bfloat16()
x, w = torch.rand(2, 16, 16, 16), torch.rand(16, 16, 3, 3)
last = dict(memory_format=torch.channels_last)
def gflops(run, flops):
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return flops / best / 1e9
f32 = gflops(lambda: a @ a, 2 * 1024**3)
bf16 = gflops(lambda: b @ b, 2 * 1024**3)
torch.conv2d(x.contiguous(**last), w.contiguous(**last))
def asked(library):
    try:
        return bool(library.mkl_serv_intel_cpu_true())
    except AttributeError:
        return None
preloaded = asked(ctypes.CDLL(None))
library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
own = asked(ctypes.CDLL(library)) if os.path.exists(library) else None
print(json.dumps({
    "torch": torch.__version__, "aten": torch.backends.cpu.get_cpu_capability(), "preloaded": preloaded, "own": own,
    "f32_gflops": f32, "bf16_gflops": bf16,
}), flush=True)
"""


@dataclass(frozen=True)
class PeerKernels:
    """The kernels of PyTorch in one environment."""

    torch: str
    # Capability of ATen's own kernels: DEFAULT, AVX2 or AVX512.
    aten: str
    # MKL's version and what its banner says of the processor; None if the product was not MKL's.
    mkl: str | None
    mkl_banner: str | None
    # The answer that MKL gets when it asks if the processor is Intel's, and whether `mkl_on_amd.c` gives it.
    is_intel: bool
    is_preloaded: bool
    # oneDNN's implementations.
    bf16: str | None
    convolution: str | None
    # Rates of 1024 x 1024 x 1024 products on one thread.
    f32_gflops: float
    bf16_gflops: float

    @staticmethod
    def parse(output: str) -> "PeerKernels":
        """The kernels of a probe that ran with the verbose modes of MKL and oneDNN on."""
        document, mkl, banner, implementations = None, None, None, {}
        for line in output.splitlines():
            if line.startswith("MKL_VERBOSE oneMKL") or line.startswith("MKL_VERBOSE Intel(R) MKL"):
                version = re.search(r"MKL ([\d.]+(?: Update \d+)?)", line)
                processors = re.search(r"for Intel\(R\) 64 architecture (.*?)(?: processors|, Lnx)", line)
                mkl = version.group(1) if version else "of an unknown version"
                banner = processors.group(1).removesuffix(" enabled") if processors else ""
            elif line.startswith("onednn_verbose") and ",exec,cpu," in line:
                kind, implementation = line.split(",exec,cpu,")[1].split(",")[:2]
                implementations.setdefault(kind, implementation)
            elif line.startswith("{"):
                document = json.loads(line)
        if document is None:
            raise ValueError(f"the probe of PyTorch's kernels printed no document:\n{output}")
        return PeerKernels(
            torch=document["torch"],
            aten=document["aten"],
            mkl=mkl,
            mkl_banner=banner,
            is_intel=bool(document["own"] or document["preloaded"]),
            is_preloaded=bool(document["preloaded"]) and not document["own"],
            bf16=implementations.get("matmul"),
            convolution=implementations.get("convolution"),
            f32_gflops=document["f32_gflops"],
            bf16_gflops=document["bf16_gflops"],
        )

    def f32_level(self) -> str:
        """The instructions of MKL's f32 products, as far as they are known."""
        banner = self.mkl_banner or ""
        if "AVX-512" in banner or "AVX512" in banner:
            return "AVX-512"
        if "AVX2" in banner:
            return "AVX2"
        if self.is_preloaded:
            return "AVX-512 (mkl_on_amd.c preloaded)"
        return "unnamed" if self.is_intel else "below AVX-512 (not Intel's processor)"

    def describe(self) -> str:
        mkl = f"MKL {self.mkl}, {self.f32_level()}" if self.mkl else "not MKL"
        return (
            f"f32 products {mkl}, {self.f32_gflops:.0f} GFLOP/s on one thread; bf16 products oneDNN {self.bf16 or 'not used'}, "
            f"{self.bf16_gflops:.0f}; convolutions oneDNN {self.convolution or 'not used'}; ATen {self.aten}"
        )

    def faults(self, flags: Iterable[str], uses: Iterable[str]) -> list[str]:
        """What of `uses` (f32, bf16, convolution) runs below the AVX-512 of a processor with `flags`."""
        flags, uses = set(flags), set(uses)
        if "avx512f" not in flags:
            return []
        faults = []
        if self.aten != "AVX512":
            faults.append(f"ATen's kernels are {self.aten} (ATEN_CPU_CAPABILITY)")
        if "f32" in uses and not self.f32_level().startswith("AVX-512"):
            remedy = "--mkl-as-on-intel preloads benches/peers/mkl_on_amd.c" if self.mkl else "this PyTorch is built without MKL"
            faults.append(f"f32 products are not MKL's for AVX-512: {self.f32_level() if self.mkl else 'not MKL'}; {remedy}")
        wanted = ("avx512_core_bf16", "avx512_core_fp16", "avx10", "amx") if "avx512_bf16" in flags else ("avx512", "avx10", "amx")
        if "bf16" in uses and not any(part in (self.bf16 or "") for part in wanted):
            faults.append(f"bf16 products are oneDNN's {self.bf16 or 'of an unknown kind'} (ONEDNN_MAX_CPU_ISA)")
        if "convolution" in uses and not any(part in (self.convolution or "") for part in ("avx512", "avx10", "amx")):
            faults.append(f"convolutions are oneDNN's {self.convolution or 'of an unknown kind'} (ONEDNN_MAX_CPU_ISA)")
        return faults


@dataclass(frozen=True)
class Peer:
    """PyTorch as a comparison runs it."""

    # Environment of its processes.
    environment: Mapping[str, str]
    kernels: PeerKernels
    # The processor's features.
    flags: list[str]
    # What runs below the processor's AVX-512, of all that is compared.
    faults: list[str]

    def mark(self, *uses: str) -> str:
        """What a figure follows that depends on `uses`, if one of them is slow."""
        return " (below AVX-512)" if self.kernels.faults(self.flags, uses) else ""

    def sentence(self, lockstep: str) -> str:
        """The kernels of both sides, for the circumstances of a table."""
        slow = f" PyTorch runs below this processor's AVX-512: {'; '.join(self.faults)}." if self.faults else ""
        return f"Kernels: Lockstep {lockstep}; PyTorch {self.kernels.describe()}.{slow}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mkl-as-on-intel", action="store_true", help="preload mkl_on_amd.c for PyTorch, built by cc (AMD's processors)")
    parser.add_argument("--allow-slow-peer", action="store_true", help="compare with a PyTorch below AVX-512 too; the table says so")


def probed(environment: Mapping[str, str]) -> PeerKernels:
    """PyTorch's kernels in `environment`."""
    verbose = {**environment, "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1", "DNNL_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=verbose, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"the probe of PyTorch's kernels exited with {done.returncode}:\n{done.stderr}")
    return PeerKernels.parse(done.stdout)


def mkl_as_on_intel(folder: Path) -> Path:
    """Builds `mkl_on_amd.c` into `folder`."""
    library = folder / "mkl_on_amd.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(HERE / "mkl_on_amd.c")], check=True)
    return library


# Holds the preloaded library until the process ends.
_FOLDERS: list[tempfile.TemporaryDirectory] = []


def prepared(arguments: argparse.Namespace, uses: Iterable[str]) -> Peer:
    """PyTorch as `arguments` ask for it. Ends the process with code 2 if it would run below the processor's AVX-512 unasked."""
    environment = dict(os.environ)
    if arguments.mkl_as_on_intel:
        _FOLDERS.append(tempfile.TemporaryDirectory())
        library = str(mkl_as_on_intel(Path(_FOLDERS[-1].name)))
        environment["LD_PRELOAD"] = " ".join(filter(None, [library, environment.get("LD_PRELOAD")]))
    kernels = probed(environment)
    flags = cpu_flags()
    faults = kernels.faults(flags, uses)
    if faults and not arguments.allow_slow_peer:
        lines = "\n".join(f"  {fault}" for fault in faults)
        print(
            f"PyTorch runs below the AVX-512 of {cpu_name()}, so a comparison would flatter Lockstep:\n{lines}\n"
            "remove the cause, or compare nevertheless with --allow-slow-peer: the table then says so",
            file=sys.stderr,
        )
        sys.exit(REFUSED)
    return Peer(environment, kernels, flags, faults)


def lockstep_kernels(binary: Path) -> str:
    """The kernels that Lockstep chooses, and why, by its own account."""
    try:
        done = subprocess.run([str(binary), "doctor", "--json"], capture_output=True, text=True, check=False)
        findings = json.loads(done.stdout)["findings"]
    except (OSError, ValueError, KeyError) as error:
        return f"unknown ({binary}: {error})"
    chosen = [finding["value"] for finding in findings if (finding["section"], finding["name"]) == ("kernels", "chosen")]
    return chosen[0] if chosen else "unknown"
