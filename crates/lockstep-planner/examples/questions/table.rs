//! The planner's usual questions: models of eight sizes on clusters from one node to 2,048.

/// A model on machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    /// Name of a model preset.
    pub(crate) model: &'static str,
    /// Name of a cluster preset.
    pub(crate) cluster: &'static str,
    /// Tokens of a sequence.
    pub(crate) seq_len: usize,
    /// Sequences of a global batch.
    pub(crate) global_batch: usize,
    /// True if any plan fits.
    pub(crate) fits: bool,
    /// Most candidates that may be evaluated for the three best plans.
    pub(crate) most_valued: usize,
    /// True if the answer takes less than half a second.
    pub(crate) is_quick: bool,
}

impl Question {
    /// Returns the settings of a run in bf16.
    pub(crate) fn settings(&self) -> Vec<String> {
        vec![
            format!("model.preset={}", self.model),
            format!("train.seq_len={}", self.seq_len),
            format!("train.global_batch={}", self.global_batch),
            "train.precision=bf16".to_owned(),
        ]
    }
}

/// Returns a question that every test run asks.
const fn quick(
    model: &'static str,
    cluster: &'static str,
    seq_len: usize,
    global_batch: usize,
    most_valued: usize,
) -> Question {
    Question { model, cluster, seq_len, global_batch, fits: true, most_valued, is_quick: true }
}

/// Returns a question that only long tests ask.
const fn long(
    model: &'static str,
    cluster: &'static str,
    seq_len: usize,
    global_batch: usize,
    most_valued: usize,
) -> Question {
    Question { model, cluster, seq_len, global_batch, fits: true, most_valued, is_quick: false }
}

/// Returns a question for which no plan fits.
const fn misfit(model: &'static str, cluster: &'static str, seq_len: usize, global_batch: usize) -> Question {
    Question { model, cluster, seq_len, global_batch, fits: false, most_valued: usize::MAX, is_quick: true }
}

/// The planner's usual questions, by model size.
pub(crate) const QUESTIONS: &[Question] = &[
    quick("gpt2-124m", "dgx-a100", 1024, 512, 50),
    quick("gpt2-124m", "dgx-h100", 1024, 512, 50),
    quick("gpt2-124m", "ethernet-100gx4", 1024, 512, 1710),
    quick("gpt2-124m", "dgx-h100x16", 1024, 512, 850),
    quick("gpt2-1558m", "dgx-a100", 1024, 512, 110),
    quick("gpt2-1558m", "dgx-h100x4", 1024, 512, 210),
    long("gpt2-1558m", "ethernet-100gx8", 1024, 512, 5810),
    quick("llama3.2-1b", "dgx-a100", 8192, 64, 210),
    quick("llama3.2-1b", "dgx-h100", 8192, 128, 220),
    quick("llama3.2-1b", "dgx-h100x4", 8192, 256, 650),
    quick("llama3.2-1b", "ethernet-100gx4", 4096, 256, 1050),
    long("llama3.2-1b", "dgx-h100x16", 8192, 512, 1160),
    quick("llama3-8b", "dgx-a100", 8192, 64, 490),
    quick("llama3-8b", "dgx-h100", 8192, 64, 810),
    quick("llama3-8b", "dgx-h100", 32768, 32, 670),
    quick("llama3-8b", "dgx-h100", 131072, 8, 60),
    quick("llama3-8b", "dgx-h100x2", 8192, 512, 2000),
    long("llama3-8b", "dgx-h100x16", 8192, 512, 1760),
    long("llama3-8b", "dgx-h100x128", 8192, 1024, 3590),
    quick("llama3-8b", "ethernet-100g", 4096, 64, 1490),
    long("llama3-8b", "ethernet-100gx4", 8192, 128, 5540),
    quick("llama3-8b", "hgx-h200", 8192, 128, 470),
    quick("llama3-8b", "dgx-b200", 8192, 128, 640),
    quick("llama3-8b", "dgx-2", 4096, 64, 590),
    long("qwen3-30b-a3b", "dgx-h100", 4096, 128, 1630),
    long("qwen3-30b-a3b", "dgx-h100x4", 4096, 512, 5210),
    long("qwen3-30b-a3b", "dgx-h100x16", 8192, 512, 8370),
    long("qwen3-30b-a3b", "dgx-b200x8", 8192, 512, 3320),
    long("mixtral-8x7b", "dgx-h100", 4096, 128, 63160),
    long("mixtral-8x7b", "dgx-h100x4", 4096, 256, 15220),
    long("mixtral-8x7b", "dgx-h100x16", 8192, 512, 14750),
    long("mixtral-8x7b", "dgx-a100x16", 4096, 512, 3030),
    long("mixtral-8x7b", "dgx-h100x64", 8192, 1024, 37210),
    long("llama3-70b", "dgx-h100", 4096, 32, 18240),
    long("llama3-70b", "dgx-h100", 8192, 64, 10150),
    quick("llama3-70b", "dgx-a100", 4096, 32, 8230),
    long("llama3-70b", "dgx-h100x2", 8192, 128, 29850),
    long("llama3-70b", "dgx-h100x4", 8192, 128, 2350),
    long("llama3-70b", "dgx-h100x8", 8192, 256, 7060),
    long("llama3-70b", "dgx-h100x16", 8192, 512, 4970),
    long("llama3-70b", "dgx-h100x32", 131072, 32, 870),
    long("llama3-70b", "dgx-h100x128", 8192, 1024, 4730),
    long("llama3-70b", "dgx-a100x16", 4096, 512, 2570),
    long("llama3-70b", "ethernet-100gx16", 4096, 512, 23220),
    long("llama3-70b", "hgx-h200", 8192, 64, 13430),
    long("llama3-70b", "hgx-h200x4", 8192, 128, 1070),
    long("llama3-70b", "dgx-b200x4", 8192, 128, 830),
    long("llama3-70b", "dgx-2", 4096, 32, 9130),
    long("llama3-405b", "dgx-h100", 8192, 64, 1590),
    long("llama3-405b", "dgx-h100x4", 8192, 128, 21450),
    long("llama3-405b", "dgx-h100x8", 8192, 128, 33400),
    long("llama3-405b", "dgx-h100x16", 8192, 256, 8040),
    long("llama3-405b", "dgx-h100x32", 8192, 512, 14270),
    long("llama3-405b", "dgx-h100x128", 8192, 1024, 25130),
    long("llama3-405b", "dgx-h100x512", 8192, 2048, 27440),
    long("llama3-405b", "dgx-h100x2048", 8192, 2048, 38340),
    long("llama3-405b", "dgx-h100x2048", 131072, 128, 21530),
    long("llama3-405b", "hgx-h200x16", 8192, 256, 11420),
    long("llama3-405b", "dgx-b200x64", 8192, 1024, 14830),
    long("llama3-405b", "dgx-a100x128", 4096, 1024, 29560),
    misfit("llama3-70b", "tpu-v5p", 8192, 64),
    misfit("llama3-405b", "tpu-v4x2", 4096, 64),
];
