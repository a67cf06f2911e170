//! The workload of a planning question: model, precision and tokens of a step. For accelerators, the keys that a question leaves
//! open get values that are usual for such machines, not the defaults of a run on a laptop.

use lockstep_config::{ModelSource, Origin, Precision, RunConfig, human, named_model};
use lockstep_plan::DType;

use crate::Error;
use crate::cluster::Cluster;

/// Longest default sequence, in tokens: beyond it pretraining is a phase of its own (The Llama 3 Herd of Models, section 3.4.2).
const LONGEST_SEQUENCE: usize = 32_768;

/// Default tokens of a global batch by model size, as pairs (at most so many parameters, tokens): GPT-3's (arXiv 2005.14165, table 2.1)
/// below 5 billion, Llama 2's (arXiv 2307.09288, table 1) up to 200 billion, Llama 3 405B's (arXiv 2407.21783, section 3.4.1) beyond.
const BATCH_TOKENS: [(u64, usize); 4] =
    [(1_000_000_000, 1 << 19), (5_000_000_000, 1 << 20), (200_000_000_000, 1 << 22), (u64::MAX, 1 << 24)];

/// A key of the run that the question leaves open, with the value that is assumed for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assumption {
    /// The setting, as `section.key=value`.
    pub setting: String,
    /// The value in words.
    pub value: String,
    /// The flag that sets another value.
    pub flag: &'static str,
}

/// Returns the assumed values of precision, sequence length and global batch where `config` leaves them open. Empty on CPUs, where
/// a run has its own defaults.
///
/// # Errors
/// If the model cannot be found.
pub fn assumptions(config: &RunConfig, cluster: &Cluster) -> Result<Vec<Assumption>, Error> {
    if cluster.is_host() {
        return Ok(Vec::new());
    }
    let is_open = |key: &str| config.origin(key) == Origin::Default;
    let (model, _) = named_model(config)?;
    let mut assumed = Vec::new();
    let mut assume = |key: &str, value: String, words: String, flag| {
        assumed.push(Assumption { setting: format!("{key}={value}"), value: words, flag });
    };
    if is_open("train.precision") {
        let precision = usual_precision(cluster).word();
        assume("train.precision", precision.to_owned(), precision.to_owned(), "--precision");
    }
    let mut seq_len = config.train.seq_len;
    if is_open("train.seq_len") {
        seq_len = model.pretraining_context().min(LONGEST_SEQUENCE);
        let words = format!("sequences of {} tokens", human::thousands(seq_len as u64));
        assume("train.seq_len", seq_len.to_string(), words, "--seq-len");
    }
    if is_open("train.global_batch") {
        let sequences = usual_batch(model.parameter_count(), seq_len, cluster.devices());
        let words = format!("{} sequences a step", human::thousands(sequences as u64));
        assume("train.global_batch", sequences.to_string(), words, "--global-batch");
    }
    Ok(assumed)
}

/// Returns bf16 if the devices multiply it; else f16 (before Ampere), else f32.
fn usual_precision(cluster: &Cluster) -> Precision {
    let has = |dtype: DType| cluster.nodes.iter().all(|node| node.device.peak_tflops.contains_key(&dtype));
    match (has(DType::BF16), has(DType::F16)) {
        (true, _) => Precision::BF16,
        (false, true) => Precision::F16,
        (false, false) => Precision::F32,
    }
}

/// Returns the sequences of a usual global batch: a power of two times the odd part of the device count, so that the devices divide it.
fn usual_batch(parameters: u64, seq_len: usize, devices: usize) -> usize {
    let of_size = BATCH_TOKENS.into_iter().find(|(most, _)| parameters <= *most);
    let tokens = of_size.map_or(1 << 22, |(_, tokens)| tokens);
    let odd = devices >> devices.trailing_zeros();
    let sequences = (tokens / seq_len.max(1)).max(1).next_power_of_two();
    let rounds = sequences.div_ceil(odd).next_power_of_two();
    if odd == 1 { sequences } else { odd * rounds }
}

/// Returns the name of a run's model: its preset, family or directory.
pub(crate) fn model_name(config: &RunConfig) -> String {
    match config.model_source() {
        ModelSource::Preset(name) | ModelSource::ModelType(name) => name.to_owned(),
        ModelSource::Path(path) => path.display().to_string(),
    }
}

/// Returns the workload in one line: model, precision and batch.
pub(crate) fn workload_in_words(config: &RunConfig, parameters: u64, trained: u64) -> String {
    let (sequences, seq_len) = (config.train.global_batch, config.train.seq_len);
    let trained = match trained == parameters {
        true => String::new(),
        false => format!(", {} trained", human::billions(trained as f64)),
    };
    // Samples such as images are no sequences.
    let batch = match seq_len {
        1 => human::plural(sequences, "sample").to_string(),
        _ => format!(
            "{} of {} tokens = {} tokens",
            human::plural(sequences, "sequence"),
            human::thousands(seq_len as u64),
            human::thousands((sequences * seq_len) as u64)
        ),
    };
    format!(
        "{} ({} parameters{trained}), {}, {batch} a step",
        model_name(config),
        human::billions(parameters as f64),
        config.train.precision.word(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assumed(settings: &[&str], cluster: &str) -> Vec<String> {
        let config = RunConfig::parse("", "a test", settings).unwrap_or_else(|error| panic!("{error}"));
        let cluster = Cluster::preset(cluster).unwrap_or_else(|error| panic!("{error}"));
        let all = assumptions(&config, &cluster).unwrap_or_else(|error| panic!("{error}"));
        all.into_iter().map(|one| one.setting).collect()
    }

    #[test]
    fn accelerators_train_in_16_bits_with_the_models_context_and_a_usual_batch() {
        let table = [
            ("gpt2-124m", "dgx-a100", ["bf16", "1024", "512"]),
            ("llama3.2-1b", "dgx-h100", ["bf16", "8192", "128"]),
            ("llama3-8b", "dgx-h100x2", ["bf16", "8192", "512"]),
            ("llama3-405b", "dgx-h100x2048", ["bf16", "8192", "2048"]),
            ("llama3-8b", "dgx-2", ["f16", "8192", "512"]),
            // Three times a power of two of devices.
            ("llama3-8b", "dgx-h100x3", ["bf16", "8192", "768"]),
        ];
        for (model, cluster, [precision, seq_len, batch]) in table {
            let expected = [
                format!("train.precision={precision}"),
                format!("train.seq_len={seq_len}"),
                format!("train.global_batch={batch}"),
            ];
            assert_eq!(
                assumed(&[&format!("model.preset={model}")], cluster),
                expected,
                "{model} on {cluster}"
            );
        }
    }

    #[test]
    fn what_is_said_is_not_assumed_and_goes_into_the_batch() {
        let settings = ["model.preset=llama3-8b", "train.seq_len=4096", "train.precision=f32"];
        assert_eq!(assumed(&settings, "dgx-h100"), ["train.global_batch=1024"]);
        let config = RunConfig::parse("", "a test", &["model.preset=llama3-8b"]).unwrap();
        assert_eq!(assumptions(&config, &Cluster::local(2, 1 << 34)).unwrap(), []);
    }
}
