"""What must hold for a comparison with the peers to mean anything.

    /tmp/peers/bin/python -m unittest discover -s benches/peers
"""

import argparse
import json
import math
import stat
import sys
import tempfile
import unittest
from pathlib import Path

import torch

import compare
import compare_sharded
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
        self.assertEqual(rows["ZeRO 1"], ["100", "1.10", "0.90", "2.00", "1.00", "1.00", "3", "8"])
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
