//! Translation of `deepspeed_config`: some keys of DeepSpeed, or the name of a DeepSpeed configuration file.

use super::Accelerate;
use crate::deepspeed;
use crate::document::{self, Syntax};
use crate::draft::Origin;
use crate::fields::{Field, Fields};
use crate::format::Format;
use crate::options::Options;
use crate::problem::Problems;

/// Pairs of (key of `deepspeed_config`, key of a DeepSpeed configuration).
const SECTION_KEYS: [(&str, &str); 6] = [
    ("zero_stage", "zero_optimization.stage"),
    ("offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ("offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    ("offload_param_device", "zero_optimization.offload_param.device"),
    ("offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"),
    ("gradient_clipping", "gradient_clipping"),
];

impl Accelerate<'_> {
    /// Translates `deepspeed_config`; `open` reads the file that it names.
    pub(super) fn deepspeed(
        &mut self,
        open: &dyn Fn(&str) -> Result<String, String>,
    ) -> Result<(), Problems> {
        let key = |name: &str| format!("deepspeed_config.{name}");
        if let Some(path) = self.fields.text(&key("deepspeed_config_file")) {
            self.read_idle_deepspeed();
            let text = match open(&path.value) {
                Ok(text) => text,
                Err(error) => {
                    self.fields.refuse(
                        &path.key,
                        format!("cannot read {}: {error}", path.shown),
                        "a file beside this one",
                    );
                    return Ok(());
                }
            };
            for name in [
                "zero_stage",
                "gradient_accumulation_steps",
                "gradient_clipping",
                "offload_optimizer_device",
                "offload_param_device",
            ] {
                if self.fields.has(&key(name)) {
                    self.fields.refuse(
                        &key(name),
                        "is given, and deepspeed_config_file says it",
                        "one of the two",
                    );
                }
            }
            return self.deepspeed_file(&path.value, &text);
        }
        let section = self.fields.section("deepspeed_config");
        let mut theirs = Fields::new(&self.fields.file, Vec::new());
        for (ours, name) in SECTION_KEYS {
            self.fields.mark(&key(ours));
            if let Some((_, field)) = section.iter().find(|(known, _)| known == ours) {
                theirs.insert(name, field.clone());
            }
        }
        let is_default = theirs.is_auto("zero_optimization.stage") || !theirs.has("zero_optimization.stage");
        if is_default {
            let node = document::Node::Scalar { text: "2".to_owned(), quoted: false };
            theirs.insert("zero_optimization.stage", Field { line: 0, node });
        }
        deepspeed::translate_section(&theirs, self.options, &mut self.import);
        for setting in &mut self.import.settings {
            rename_origin(&mut setting.origin);
            if is_default && setting.key == "parallel.zero_stage" {
                setting.origin = Origin::ForeignDefault("zero_stage of deepspeed_config".to_owned());
            }
        }
        for problem in theirs.outcome(Format::DeepSpeed).err().into_iter().flat_map(|problems| problems.0) {
            let ours = SECTION_KEYS
                .iter()
                .find(|(_, name)| *name == problem.key)
                .map_or(problem.key.clone(), |(ours, _)| key(ours));
            self.fields.refuse(&ours, problem.what, problem.allowed);
        }
        Ok(())
    }

    fn deepspeed_file(&mut self, file: &str, text: &str) -> Result<(), Problems> {
        let entries = document::read(text, file, Syntax::Json).map_err(|problem| Problems(vec![problem]))?;
        let mut theirs = Fields::new(file, entries);
        deepspeed::rename(&mut theirs);
        let ranks = self.ranks().map(|read| read.value as usize);
        let options = Options { ranks, ..self.options };
        deepspeed::translate(&theirs, options, &mut self.import);
        theirs.settle(Format::DeepSpeed, &mut self.import);
        theirs.outcome(Format::DeepSpeed)
    }

    /// Marks the keys of `deepspeed_config` as read, for files in which the section is not used.
    pub(super) fn read_idle_deepspeed(&mut self) {
        for (ours, _) in SECTION_KEYS {
            self.fields.mark(&format!("deepspeed_config.{ours}"));
        }
        self.fields.mark("deepspeed_config.deepspeed_config_file");
    }
}

/// Replaces DeepSpeed's own key by that of `deepspeed_config` in the origin of a value.
fn rename_origin(origin: &mut Origin) {
    let rename = |key: &mut String| {
        if let Some((ours, _)) = SECTION_KEYS.iter().find(|(_, theirs)| theirs == key) {
            *key = format!("deepspeed_config.{ours}");
        }
    };
    match origin {
        Origin::File { key, .. } => rename(key),
        Origin::Trainer { keys, .. } => keys.iter_mut().for_each(rename),
        Origin::ForeignDefault(_) | Origin::Derived(_) => {}
    }
}
