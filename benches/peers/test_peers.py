"""What must hold for a comparison with the peers to mean anything.

    /tmp/peers/bin/python -m unittest discover -s benches/peers
"""

import argparse
import contextlib
import io
import json
import math
import os
import stat
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

import compare
import compare_sharded
import compare_gemm
import kernels
import machine
import nanogpt_curve as recipe
from models import build, canonical_tensors, load_canonical_tensors


class Weights(unittest.TestCase):
    def test_canonical_names_carry_every_weight_there_and_back(self):
        for preset in ("baby-gpt", "gpt2-124m"):
            source = build(preset, layers=2, vocab=64)
            target = build(preset, layers=2, vocab=64)
            tensors = canonical_tensors(source)
            load_canonical_tensors(target, tensors)
            self.assertEqual(sum(t.numel() for t in tensors.values()), sum(p.numel() for p in source.parameters()))
            for name, parameter in source.named_parameters():
                self.assertTrue(torch.equal(parameter, target.get_parameter(name)), f"{preset} {name}")

    def test_query_key_and_value_are_matrices_of_their_own(self):
        model = build("baby-gpt", layers=1, vocab=64)
        tensors = canonical_tensors(model)
        fused = model.blocks[0].attention_qkv.weight
        for i, name in enumerate("qkv"):
            self.assertTrue(torch.equal(tensors[f"transformer.h.0.attn.{name}.weight"], fused[i * 384 : (i + 1) * 384]))

    def test_a_missing_and_a_left_over_tensor_are_both_named(self):
        model = build("baby-gpt", layers=1, vocab=64)
        tensors = canonical_tensors(model)
        tensors["lm_head.weight"] = tensors.pop("transformer.ln_f.weight")
        with self.assertRaisesRegex(ValueError, "transformer.ln_f.weight.*lm_head.weight"):
            load_canonical_tensors(model, tensors)

    def test_a_prediction_does_not_see_the_tokens_after_it(self):
        for preset in ("baby-gpt", "gpt2-124m", "llama-110m"):
            model = build(preset, layers=2, vocab=64).eval()
            ids = torch.randint(64, (1, 16))
            changed = ids.clone()
            changed[0, 9:] = (changed[0, 9:] + 1) % 64
            with torch.no_grad():
                torch.testing.assert_close(model(ids)[:, :9], model(changed)[:, :9], msg=preset)


class Recipe(unittest.TestCase):
    def test_learning_rate_warms_up_from_one_hundredth_and_ends_at_the_minimum(self):
        expected = {0: 1e-5, 49: 5e-4, 99: 1e-3, 100: 1e-3, 2550: 5.5e-4, 5000: 1e-4, 9000: 1e-4}
        for step, rate in expected.items():
            self.assertAlmostEqual(recipe.learning_rate(step), rate, places=12, msg=f"step {step}")

    def test_sequential_samples_run_through_all_windows_and_begin_again(self):
        tokens = 100 * recipe.SEQ_LEN + 1
        offsets = recipe.sequential_offsets(tokens, 0) + recipe.sequential_offsets(tokens, 1)
        self.assertEqual(offsets, [i % 100 * recipe.SEQ_LEN for i in range(128)])

    def test_the_last_window_needs_its_label(self):
        tokens = 100 * recipe.SEQ_LEN
        self.assertEqual(max(recipe.sequential_offsets(tokens, 0) + recipe.sequential_offsets(tokens, 1)), 98 * recipe.SEQ_LEN)

    def test_labels_are_the_next_tokens(self):
        corpus = torch.arange(2 * recipe.SEQ_LEN + 1) % 251
        ids, labels = recipe.batch_at(corpus.to(torch.uint8), [0, recipe.SEQ_LEN])
        self.assertTrue(torch.equal(ids[:, 1:], labels[:, :-1]))
        self.assertEqual(labels[0, -1].item(), ids[1, 0].item())


ENGINE = """#!{python}
import json, sys
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 0
print(json.dumps({{"tokens_per_s": 1e4, "step_ms": 1.0, "peak_rss_bytes": 1, "loss": {losses}}}))
"""


class Comparison(unittest.TestCase):
    def engine(self, losses: str) -> Path:
        """A stand-in for the lockstep binary that reports `losses`, a Python expression in `steps`."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        path = folder / "lockstep"
        path.write_text(ENGINE.format(python=sys.executable, losses=losses), encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def test_a_round_yields_one_ratio(self):
        case = compare.Case("baby-gpt", "f32", 1, 16)
        arguments = argparse.Namespace(lockstep=self.engine("[5.5] * steps"), rounds=1, steps=1, threads=1, ranks=1)
        row = compare.measure(case, arguments)
        self.assertEqual(row.ratios, [1e4 / row.pytorch["tokens_per_s"]])
        self.assertEqual(row.pytorch["environment"]["threads"], 1)

    def test_ranks_are_compared_with_ddp(self):
        case = compare.Case("baby-gpt", "f32", 1, 16)
        arguments = argparse.Namespace(lockstep=self.engine("[5.5] * steps"), rounds=1, steps=2, threads=1, ranks=2)
        row = compare.measure(case, arguments)
        self.assertEqual((row.pytorch_mode, len(row.ratios)), ("DDP", 1))
        self.assertGreater(row.pytorch["peak_rss_bytes"], 2 * 10_000_000 * 16)

    def test_an_engine_that_diverges_or_skips_steps_has_no_speed(self):
        for losses in ("[float('nan')] * steps", "[5.5]"):
            with self.assertRaisesRegex(compare.Failed, "2 finite losses"):
                compare.run([str(self.engine(losses)), "--steps", "2"], 2)

    def test_the_initial_loss_is_that_of_a_uniform_guess(self):
        case = compare.Case("llama-110m", "f32", 1, 256)
        command = [sys.executable, str(compare.HERE / "pytorch_step.py"), *case.flags(threads=1, steps=1), "--warmup", "0"]
        self.assertAlmostEqual(compare.run(command, 1)["loss"][0], math.log(32_000), delta=0.2)


def verbose(banner: str, own: bool | None = False, preloaded: bool | None = None, bf16: str = "brg_matmul:avx512_core_bf16") -> str:
    """What a probe prints where MKL's banner names `banner`."""
    document = {"torch": "2.15", "aten": "AVX512", "own": own, "preloaded": preloaded, "f32_gflops": 105.2, "bf16_gflops": 464.0}
    return f"""MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture {banner}, Lnx 2.60GHz
MKL_VERBOSE SGEMM(N,N,256,256,256,0x7ffe,0x563e,256,0x563e,256,0x7ffe,0x563e,256) 23.98ms CNR:OFF Dyn:1 FastMM:1 TID:0  NThr:2
onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost and bfloat16 support
onednn_verbose,v1,primitive,exec,cpu,matmul,{bf16},undef,src:bf16::blocked:ab::f0,attr-scratchpad:user,,256x256:256x256,0.48
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,src:f32::blocked:abcd::f0,attr-scratchpad:user,,2x16x16x16,0.05
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core,forward_training,src:f32:a:blocked:aBcd16b::f0,,,,3.9
{json.dumps(document)}
"""


ON_INTEL = "Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with support of Intel(R) DL Boost enabled processors"
WITH_AMX = "Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with support for INT8, BF16, FP16 (limited) instructions, and Intel(R) Advanced Matrix Extensions (Intel(R) AMX) with INT8 and BF16"
ON_AMD = "Intel(R) Architecture processors"
ALL = ["f32", "bf16", "convolution"]


class Kernels(unittest.TestCase):
    WIDE = ["avx2", "avx512f", "avx512_bf16"]

    def faults(self, *given, uses=ALL, flags=WIDE, **named) -> list[str]:
        return kernels.PeerKernels.parse(verbose(*given, **named)).faults(flags, uses)

    def test_the_kernels_are_those_that_the_libraries_name(self):
        found = kernels.PeerKernels.parse(verbose(ON_INTEL, own=True))
        self.assertEqual((found.mkl, found.f32_level()), ("2024.0 Update 2", "AVX-512"))
        self.assertEqual((found.bf16, found.convolution), ("brg_matmul:avx512_core_bf16", "brg_conv_fwd:avx512_core"))
        for part in ("MKL 2024.0 Update 2, AVX-512, 105 GFLOP/s", "oneDNN brg_matmul:avx512_core_bf16, 464", "ATen AVX512"):
            self.assertIn(part, found.describe())
        with self.assertRaisesRegex(ValueError, "no document"):
            kernels.PeerKernels.parse("MKL_VERBOSE")

    def test_a_peer_below_the_processors_avx512_is_a_fault_with_its_remedy(self):
        self.assertEqual(self.faults(ON_INTEL, own=True), [])
        self.assertEqual(self.faults(WITH_AMX, own=True, bf16="brg_matmul:avx10_1_512_amx"), [], "its banner ends otherwise")
        self.assertEqual(self.faults(ON_AMD, preloaded=True), [])
        (fault,) = self.faults(ON_AMD)
        self.assertIn("--mkl-as-on-intel", fault)
        self.assertEqual(len(self.faults("Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) enabled processors", own=True)), 1)
        self.assertIn("oneDNN's gemm:jit:bf16", self.faults(ON_INTEL, own=True, bf16="gemm:jit:bf16")[0])
        self.assertEqual(len(self.faults(ON_INTEL, own=True, bf16="brg_matmul:avx512_core")), 1, "its dot products are left out")
        self.assertEqual(self.faults(ON_INTEL, own=True, bf16="brg_matmul:avx512_core", flags=["avx512f"]), [])
        self.assertEqual(self.faults(ON_AMD, uses=["bf16"]), [], "bf16 products are not MKL's")
        self.assertEqual(self.faults(ON_AMD, flags=["avx2"]), [], "the processor has no AVX-512")

    def test_the_table_of_a_slow_peer_says_so(self):
        found = kernels.PeerKernels.parse(verbose(ON_AMD))
        peer = kernels.Peer({}, found, self.WIDE, found.faults(self.WIDE, ALL))
        self.assertEqual((peer.mark("f32"), peer.mark("bf16")), (" (below AVX-512)", ""))
        self.assertIn("PyTorch runs below this processor's AVX-512: f32 products", peer.sentence("AVX-512"))
        run = {"speeds": [10.0, 12.0], "peak_rss_bytes": 2**20}
        row = compare.Row(compare.Case("baby-gpt", "f32", 1, 16), run, run, "f32", [1.0, 1.0])
        self.assertEqual(compare.cells(row, peer.mark("f32"))[2], "11 (10 to 12) (below AVX-512)")

    def test_a_slow_peer_is_refused_unless_it_is_allowed(self):
        slow = kernels.PeerKernels.parse(verbose(ON_AMD))
        self.enterContext(mock.patch.object(kernels, "probed", lambda environment: slow))
        self.enterContext(mock.patch.object(kernels, "cpu_flags", lambda: self.WIDE))
        errors = self.enterContext(contextlib.redirect_stderr(io.StringIO()))
        with self.assertRaises(SystemExit) as refused:
            kernels.prepared(argparse.Namespace(mkl_as_on_intel=False, allow_slow_peer=False), ["f32"])
        self.assertEqual(refused.exception.code, 2)
        for remedy in ("mkl_on_amd.c", "--mkl-as-on-intel", "--allow-slow-peer"):
            self.assertIn(remedy, errors.getvalue())
        allowed = kernels.prepared(argparse.Namespace(mkl_as_on_intel=False, allow_slow_peer=True), ["f32"])
        self.assertEqual(len(allowed.faults), 1)

    def test_the_probe_finds_the_kernels_of_this_machine_and_the_library_is_preloaded(self):
        arguments = argparse.Namespace(mkl_as_on_intel=True, allow_slow_peer=True)
        peer = kernels.prepared(arguments, ALL)
        self.assertTrue(peer.environment["LD_PRELOAD"].split()[0].endswith("mkl_on_amd.so"))
        self.assertNotIn("mkl_on_amd", os.environ.get("LD_PRELOAD", ""), "Lockstep's processes do not get it")
        self.assertTrue(peer.kernels.is_intel or peer.kernels.mkl is None)
        self.assertGreater(peer.kernels.f32_gflops, 0)

    def test_rounds_have_turns_and_ratios_of_their_own(self):
        self.assertEqual([machine.by_turns(number, ["a", "b", "c"])[0] for number in range(4)], ["a", "b", "c", "a"])
        order, rates = [], {"Lockstep": iter([100.0, 50.0, 90.0]), "PyTorch": iter([50.0, 50.0, 30.0])}
        shape = {"name": "qkv", "layout": "NT", "m": 1, "n": 2, "k": 3}

        def run(engine: str, shapes: list[dict]) -> list[dict]:
            order.append(engine)
            return [{**one, "gflops": next(rates[engine])} for one in shapes]

        engines = ["Lockstep", "PyTorch"]
        (row,) = compare_gemm.rounds_of(run, [shape], 3, engines)
        self.assertEqual(order, ["Lockstep", "PyTorch", "PyTorch", "Lockstep", "Lockstep", "PyTorch"])
        expected = ["qkv", "NT", "1 x 2 x 3", "90 (50 to 100)", "50 (30 to 50)", "2.00", "1.00", "3.00"]
        self.assertEqual(compare_gemm.cells(row, engines, ""), expected)


class Shards(unittest.TestCase):
    ENGINES = [compare_sharded.COPIES, "ZeRO 1", "ZeRO 2", "ZeRO 3", compare_sharded.KEPT, compare_sharded.FREED]

    def round(self, first: int, speeds: dict[str, float], order: list[str]) -> dict:
        """A round of engines that answer by their names alone, and note in `order` when."""

        def execute(command: list[str], steps: int) -> dict:
            order.append(command[0])
            memory = {"memory_by_rank": [{"process_pss": 2**20}, {"process_pss": 2**21}]}
            if command[0].startswith("FSDP2"):
                memory = {"pss_bytes": 2**22, "environment": {"torch": "2.15"}}
            return {"tokens_per_s": speeds.get(command[0], 100.0), "step_ms": 1.0, "peak_rss_bytes": 2**23, "loss": [1.0] * steps, **memory}

        return compare_sharded.measure({name: [name] for name in self.ENGINES}, 2, first, execute)

    def test_each_round_begins_with_another_and_ratios_are_of_the_same_round(self):
        order: list[str] = []
        speeds = [{"ZeRO 1": 110.0, compare_sharded.FREED: 50.0}, {compare_sharded.COPIES: 50.0}, {"ZeRO 1": 90.0}]
        rounds = [self.round(number, of_round, order) for number, of_round in enumerate(speeds)]
        self.assertEqual(order[6:12], self.ENGINES[1:] + self.ENGINES[:1])
        rows = {row[0]: row[1:] for row in compare_sharded.table(rounds)[1:]}
        self.assertEqual(rows["ZeRO 1"], ["100 (90 to 110)", "1.10", "0.90", "2.00", "1.00", "1.00", "3", "8"])
        self.assertEqual(rows[compare_sharded.FREED][1], "1.00")
        self.assertEqual(rounds[0]["torch"], "2.15")

    def test_all_engines_are_asked_for_the_same_case(self):
        arguments = argparse.Namespace(lockstep=Path("lockstep"), ranks=2, threads=1, steps=3, zero_settings=["--set", "a.b=1"])
        case = compare.Case("gpt2-124m", "f32", 1, 512)
        commands = compare_sharded.commands(case, arguments)
        self.assertEqual(list(commands), self.ENGINES)
        for name, command in commands.items():
            text = " ".join(command)
            self.assertIn("--model gpt2-124m --precision f32 --batch 1 --seq-len 512 --threads 1 --steps 3", text, name)
            self.assertEqual("a.b=1" in text, name.startswith("ZeRO"), name)

    def test_rounds_of_other_circumstances_are_not_mixed(self):
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "rounds.json"
        self.assertEqual(compare_sharded.recorded(path, {"ranks": 2}), [])
        path.write_text(json.dumps({"ranks": 2, "rounds": [{"load": 0.5}]}), encoding="utf-8")
        self.assertEqual(compare_sharded.recorded(path, {"ranks": 2}), [{"load": 0.5}])
        with self.assertRaisesRegex(compare.Failed, "ranks 2, now 4"):
            compare_sharded.recorded(path, {"ranks": 4})

    def test_fsdp2_trains_as_ddp_does(self):
        flags = [*compare.Case("baby-gpt", "f32", 1, 16).flags(threads=1, steps=3), "--warmup", "0", "--accumulation", "2"]

        def losses(script: str, *more: str) -> list[float]:
            return compare.run([sys.executable, str(compare.HERE / script), *flags, *more], 3)["loss"]

        expected = losses("ddp_step.py")
        for reshard in ("yes", "no"):
            found = losses("fsdp2_step.py", "--reshard", reshard)
            for a, b in zip(expected, found, strict=True):
                self.assertAlmostEqual(a, b, delta=1e-4 * a, msg=f"reshard {reshard}: {found}, DDP {expected}")


if __name__ == "__main__":
    unittest.main()
