//! Bytes of weights, gradients and optimizer state per rank under ZeRO, by formula (Rajbhandari et al., "ZeRO: memory optimizations
//! toward training trillion parameter models", 2020, section 5).
//!
//! For `P` parameters over `N` ranks, with `w`, `g` and `o` bytes of weight, gradient and optimizer state each:
//!
//! ```text
//! stage 0   (w + g + o) P
//! stage 1   (w + g) P + o P / N
//! stage 2   w P + (g + o) P / N
//! stage 3   (w + g + o) P / N
//! ```
//!
//! [`predicted`](crate::predicted) is exact for Lockstep itself. These formulas are for systems that are known only by them, and for
//! quick estimates, such as the bounds of a search.

use crate::ZeroStage;

/// Bytes of model state per parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateBytes {
    /// Bytes of the weight that kernels read.
    pub weight: u64,
    /// Bytes of the gradient.
    pub gradient: u64,
    /// Bytes of the optimizer state, including a master weight.
    pub optimizer: u64,
}

/// Bytes of model state on a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateOnRank {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of gradients.
    pub gradients: u64,
    /// Bytes of optimizer state and master weights.
    pub optimizer: u64,
}

impl StateOnRank {
    /// Returns the sum of all three.
    pub const fn total(&self) -> u64 {
        self.weights + self.gradients + self.optimizer
    }
}

impl StateBytes {
    /// Mixed-precision AdamW: weights and gradients in 16 bits, master weights and both moments in f32.
    pub const MIXED_ADAM: Self = Self { weight: 2, gradient: 2, optimizer: 12 };
    /// Mixed-precision AdamW with gradients accumulated in f32, as in Megatron-LM and Lockstep.
    pub const MIXED_ADAM_F32_GRADIENTS: Self = Self { gradient: 4, ..Self::MIXED_ADAM };

    /// AdamW in f32: weights, gradients and both moments.
    pub const ADAM_F32: Self = Self { weight: 4, gradient: 4, optimizer: 8 };

    /// Returns the bytes on each of `ranks` ranks for `parameters` under a ZeRO stage; shards are rounded up.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn on_rank(self, parameters: u64, ranks: u64, stage: ZeroStage) -> StateOnRank {
        let held = |from: ZeroStage| if stage >= from { parameters.div_ceil(ranks) } else { parameters };
        StateOnRank {
            weights: self.weight * held(ZeroStage::Parameters),
            gradients: self.gradient * held(ZeroStage::Gradients),
            optimizer: self.optimizer * held(ZeroStage::Optimizer),
        }
    }

    /// Returns the maximum number of parameters whose state alone fits into `memory_bytes` on each rank.
    ///
    /// # Panics
    /// If `ranks` is 0, or if the state takes no bytes.
    pub fn most_parameters(self, memory_bytes: u64, ranks: u64, stage: ZeroStage) -> u64 {
        let shared = |bytes: u64, from: ZeroStage| if stage >= from { bytes } else { bytes * ranks };
        let bytes_of_ranks = shared(self.weight, ZeroStage::Parameters)
            + shared(self.gradient, ZeroStage::Gradients)
            + shared(self.optimizer, ZeroStage::Optimizer);
        (u128::from(memory_bytes) * u128::from(ranks) / u128::from(bytes_of_ranks)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GB on each of a number of ranks, for stages 1 to 3.
    type Rows = [(u64, [&'static str; 3]); 6];

    const STAGES: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
    const GB: f64 = 1e9;
    const GIB: f64 = 1_073_741_824.0;

    /// Checks that a number is printed like this: rounded, or with the remaining digits cut off.
    #[track_caller]
    fn assert_prints(value: f64, printed: &str, what: &str) {
        let digits = printed.split_once('.').map_or(0, |(_, digits)| digits.len());
        let scale = 10_f64.powi(digits as i32);
        let rounded = format!("{value:.digits$}");
        // The paper rounds half a unit up.
        let up = format!("{:.digits$}", value + 1e-9);
        let cut = format!("{:.digits$}", (value * scale).floor() / scale);
        assert!([rounded, up, cut].iter().any(|text| text == printed), "{what}: {value} and not {printed}");
    }

    #[test]
    fn a_rank_holds_what_table_1_of_zero_says() {
        let tables: [(u64, Rows); 3] = [
            (
                7_500_000_000,
                [
                    (1, ["120", "120", "120"]),
                    (4, ["52.5", "41.3", "30"]),
                    (16, ["35.6", "21.6", "7.5"]),
                    (64, ["31.4", "16.6", "1.88"]),
                    (256, ["30.4", "15.4", "0.47"]),
                    (1024, ["30.1", "15.1", "0.12"]),
                ],
            ),
            (
                128_000_000_000,
                [
                    (1, ["2048", "2048", "2048"]),
                    (4, ["896", "704", "512"]),
                    (16, ["608", "368", "128"]),
                    (64, ["536", "284", "32"]),
                    (256, ["518", "263", "8"]),
                    (1024, ["513", "257", "2"]),
                ],
            ),
            (
                1_000_000_000_000,
                [
                    (1, ["16000", "16000", "16000"]),
                    (4, ["7000", "5500", "4000"]),
                    (16, ["4750", "2875", "1000"]),
                    (64, ["4187", "2218", "250"]),
                    (256, ["4046", "2054", "62.5"]),
                    (1024, ["4011", "2013", "15.6"]),
                ],
            ),
        ];
        for (parameters, rows) in tables {
            for (ranks, printed) in rows {
                for (stage, printed) in STAGES.into_iter().zip(printed) {
                    let held = StateBytes::MIXED_ADAM.on_rank(parameters, ranks, stage).total();
                    let what = format!("{parameters} parameters, {ranks} ranks, {stage:?}");
                    assert_prints(held as f64 / GB, printed, &what);
                }
            }
        }
    }

    #[test]
    fn a_rank_holds_what_figure_1_of_zero_says() {
        let held = |stage| StateBytes::MIXED_ADAM.on_rank(7_500_000_000, 64, stage).total() as f64 / GB;
        assert_prints(held(ZeroStage::Nothing), "120", "all of it");
        for (stage, printed) in STAGES.into_iter().zip(["31.4", "16.6", "1.9"]) {
            assert_prints(held(stage), printed, &format!("{stage:?}"));
        }
    }

    #[test]
    fn the_largest_models_are_those_of_table_2_of_zero() {
        // 10⁹ parameters on 64 data-parallel ranks with 32 GB, with one model-parallel rank and more.
        let stages = [ZeroStage::Nothing, STAGES[0], STAGES[1], STAGES[2]];
        let most =
            stages.map(|stage| StateBytes::MIXED_ADAM.most_parameters(32_000_000_000, 64, stage) as f64 / GB);
        let printed = ["2", "7.6", "14.4", "128"];
        for (most, printed) in most.into_iter().zip(printed) {
            assert_prints(most, printed, "one model-parallel rank");
        }
        for (ranks, row) in [
            (2.0, [4.0, 15.2, 28.8, 256.0]),
            (4.0, [8.0, 30.4, 57.6, 500.0]),
            (8.0, [16.0, 60.8, 115.2, 1000.0]),
            (16.0, [32.0, 121.6, 230.4, 2000.0]),
        ] {
            for ((one, first), expected) in most.into_iter().zip(printed).zip(row) {
                // Multiples of the first row as printed; 512 and its multiples are printed as round numbers.
                let first: f64 = first.parse().unwrap_or(one);
                let is_printed =
                    ranks * first == expected || (expected >= 500.0 && ranks * first <= expected * 1.024);
                assert!(is_printed, "{ranks} model-parallel ranks: {} and not {expected}", ranks * one);
            }
        }
    }

    #[test]
    fn a_gpu_holds_what_deepspeeds_documentation_says() {
        // T5-3B on 8 GPUs. Its gradients are in f32 and counted with the optimizer. The 16-bit ones are whole at stage 2 and not counted
        // at stage 3. There the largest layer (32,128 by 1,024, printed as 32M) is gathered in 16 bits, with its gradient.
        let (parameters, largest) = (2_851_000_000, 32_900_000);
        let stage_2 = StateBytes { weight: 2, gradient: 2, optimizer: 16 };
        let stage_3 = StateBytes { gradient: 0, ..stage_2 };
        let held = stage_2.on_rank(parameters, 8, ZeroStage::Optimizer);
        assert_prints(held.total() as f64 / GIB, "15.93", "stage 2");
        assert_prints(held.weights as f64 / GIB, "5.31", "stage 2, optimizer and gradients in host memory");
        let held = stage_3.on_rank(parameters, 8, ZeroStage::Parameters);
        let gathered = |largest: u64| 4 * largest;
        let gib = |bytes: u64| (gathered(largest) + bytes) as f64 / GIB;
        assert_prints(gib(held.total()), "6.10", "stage 3");
        assert_prints(gib(held.weights), "0.79", "stage 3, optimizer in host memory");
        assert_prints(gib(0), "0.12", "stage 3, all in host memory");

        // T5-large on 4 GPUs, in MiB.
        let held = stage_3.on_rank(737_670_000, 4, ZeroStage::Parameters);
        let mib = |bytes: u64| (gathered(largest) + bytes) as f64 / GIB * 1024.0;
        assert_prints(mib(held.total()), "3291", "T5-large");
        assert_prints(mib(held.weights), "477", "T5-large, optimizer in host memory");
        assert_prints(mib(0), "125", "T5-large, all in host memory");
    }

    #[test]
    fn a_gpu_holds_what_figure_1_of_korthikanti_says() {
        // 18 bytes for each of the 12 h² weights of a layer.
        for (name, layers, hidden, stages, gib) in [
            ("22B", 48, 6144_u64, 1, "45.5625"),
            ("175B", 96, 12_288, 8, "45.5625"),
            ("530B", 105, 20_480, 35, "31.64"),
            ("1T", 128, 25_600, 64, "32.96"),
        ] {
            let parameters = 12 * layers * hidden * hidden / 8 / stages;
            let held = StateBytes::MIXED_ADAM_F32_GRADIENTS.on_rank(parameters, 1, ZeroStage::Nothing);
            assert_prints(held.total() as f64 / GIB, gib, name);
        }
    }
}
