//! Architectures of GGUF files, and the names of their tensors in Hugging Face's and in llama.cpp's form (llama.cpp:
//! `gguf-py/gguf/tensor_mapping.py`).

use lockstep_model::LlamaFamily;

/// An architecture of llama.cpp.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// Value of `general.architecture`.
    pub(crate) name: &'static str,
    /// Families with this architecture. The first is that of a file without a sliding window, the last of a file with one.
    pub(crate) families: &'static [LlamaFamily],
    /// True if the rows of queries and keys are stored with the two halves of a head in alternate places, because RoPE rotates neighbours.
    pub(crate) interleaves_heads: bool,
    /// True if one is added to the weights of norms.
    pub(crate) shifts_norms: bool,
    /// Modules of a block: in Hugging Face's form and in llama.cpp's.
    modules: &'static [Names],
}

/// Modules outside blocks.
const OUTSIDE: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

/// Names in Hugging Face's form and in llama.cpp's.
type Names = &'static [(&'static str, &'static str)];

const ATTENTION: Names = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
];

const FEED_FORWARD_NORM: Names = &[("post_attention_layernorm", "ffn_norm")];

const FEED_FORWARD: Names =
    &[("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")];

/// The router and the stacks of experts of Mixtral, which have the names of the parameters.
const MIXTRAL_EXPERTS: Names = &[
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.w2", "ffn_down_exps"),
];

const EXPERTS: Names = &[
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
];

const QWEN_ROUTER: Names = &[("mlp.gate", "ffn_gate_inp")];

const SHARED_EXPERT: Names = &[
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    (SHARED_GATE, "ffn_gate_inp_shexp"),
];

const GPT_OSS: Names = &[("post_attention_layernorm", "post_attention_norm"), ("mlp.router", "ffn_gate_inp")];

/// The layer that weights the output of the shared expert, which has one row.
const SHARED_GATE: &str = "mlp.shared_expert_gate";

/// Tensors of a block whose names have no module and kind in one of the forms.
const WHOLE: Names = &[("self_attn.sinks", "attn_sinks.weight")];

/// Projections of one expert in files of before llama.cpp stacked them, of which only Mixtral's have any: `blk.0.ffn_gate.7.weight`.
const SINGLE_EXPERTS: Names = &[("w1", "ffn_gate"), ("w3", "ffn_up"), ("w2", "ffn_down")];

const PHI3: Names = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Norms before and after attention and feed-forward; OLMo 2 has those after.
const NORMS_AROUND: Names = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

const PLAIN: Architecture = Architecture {
    name: "",
    families: &[],
    interleaves_heads: false,
    shifts_norms: false,
    modules: &[ATTENTION, FEED_FORWARD_NORM, FEED_FORWARD],
};

impl Architecture {
    /// The architectures that are read and written.
    pub(crate) const ALL: [Self; 12] = [
        Self {
            name: "llama",
            families: &[LlamaFamily::Llama, LlamaFamily::Mistral],
            interleaves_heads: true,
            ..PLAIN
        },
        Self {
            name: "llama",
            families: &[LlamaFamily::Mixtral],
            interleaves_heads: true,
            modules: &[ATTENTION, FEED_FORWARD_NORM, MIXTRAL_EXPERTS],
            ..PLAIN
        },
        Self { name: "qwen2", families: &[LlamaFamily::Qwen2], ..PLAIN },
        Self {
            name: "qwen2moe",
            families: &[LlamaFamily::Qwen2Moe],
            modules: &[ATTENTION, FEED_FORWARD_NORM, QWEN_ROUTER, EXPERTS, SHARED_EXPERT],
            ..PLAIN
        },
        Self { name: "qwen3", families: &[LlamaFamily::Qwen3], ..PLAIN },
        Self {
            name: "qwen3moe",
            families: &[LlamaFamily::Qwen3Moe],
            modules: &[ATTENTION, FEED_FORWARD_NORM, QWEN_ROUTER, EXPERTS],
            ..PLAIN
        },
        Self {
            name: "gpt-oss",
            families: &[LlamaFamily::GptOss],
            modules: &[ATTENTION, GPT_OSS, EXPERTS],
            ..PLAIN
        },
        Self { name: "phi3", families: &[LlamaFamily::Phi3], modules: &[PHI3, FEED_FORWARD_NORM], ..PLAIN },
        Self {
            name: "olmo2",
            families: &[LlamaFamily::Olmo2],
            modules: &[ATTENTION, NORMS_AROUND, FEED_FORWARD],
            ..PLAIN
        },
        Self { name: "gemma", families: &[LlamaFamily::Gemma], shifts_norms: true, ..PLAIN },
        Self {
            name: "gemma2",
            families: &[LlamaFamily::Gemma2],
            shifts_norms: true,
            modules: &[ATTENTION, NORMS_AROUND, FEED_FORWARD],
            ..PLAIN
        },
        Self {
            name: "gemma3",
            families: &[LlamaFamily::Gemma3],
            shifts_norms: true,
            modules: &[ATTENTION, NORMS_AROUND, FEED_FORWARD],
            ..PLAIN
        },
    ];

    /// Returns the architectures called `name`: one, or one without and one with experts.
    pub(crate) fn called(name: &str) -> impl Iterator<Item = &'static Self> {
        const { &Self::ALL }.iter().filter(move |architecture| architecture.name == name)
    }

    /// Returns true if its models have experts.
    pub(crate) fn has_experts(&self) -> bool {
        self.families.iter().any(|family| family.has_experts())
    }

    /// Returns the architecture of a family.
    pub(crate) fn of(family: LlamaFamily) -> Option<&'static Self> {
        const { &Self::ALL }.iter().find(|architecture| architecture.families.contains(&family))
    }

    /// Returns the names of all architectures, for messages.
    pub(crate) fn names() -> String {
        let mut names = Self::ALL.map(|architecture| architecture.name).to_vec();
        names.dedup();
        names.join(", ")
    }

    /// Returns the name of a tensor in Hugging Face's form; `None` if the architecture has no such tensor.
    pub(crate) fn hf_name(&self, name: &str) -> Option<String> {
        let in_block = |name: &str| {
            let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
            let (module, kind) = rest.rsplit_once('.')?;
            let (projection, expert) = module.rsplit_once('.')?;
            let is_number = !expert.is_empty() && expert.bytes().all(|byte| byte.is_ascii_digit());
            let (hf, _) = SINGLE_EXPERTS.iter().find(|(_, gguf)| is_number && *gguf == projection)?;
            Some(format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{hf}.{kind}"))
        };
        let renamed = self.renamed(name, ["blk.", "model.layers."], |&(hf, gguf)| [gguf, hf]);
        let is_mixtral = self.families.contains(&LlamaFamily::Mixtral);
        renamed.or_else(|| in_block(name).filter(|_| is_mixtral))
    }

    /// Returns the name in llama.cpp's form of a tensor in Hugging Face's; `None` if the architecture has no such tensor.
    pub(crate) fn gguf_name(&self, name: &str) -> Option<String> {
        self.renamed(name, ["model.layers.", "blk."], |&(hf, gguf)| [hf, gguf])
    }

    /// Returns the name of a tensor in the other form. `blocks` are the prefixes of blocks, and `order` orders the names of a module,
    /// both from the given form to the other.
    fn renamed(
        &self,
        name: &str,
        blocks: [&str; 2],
        order: fn(&(&'static str, &'static str)) -> [&'static str; 2],
    ) -> Option<String> {
        let find = |modules: &[(&'static str, &'static str)], module: &str| {
            modules.iter().map(order).find(|[from, _]| *from == module).map(|[_, to]| to)
        };
        let (module, kind) = name.rsplit_once('.')?;
        if let Some(to) = find(&OUTSIDE, module) {
            return Some(format!("{to}.{kind}"));
        }
        let (layer, rest) = name.strip_prefix(blocks[0])?.split_once('.')?;
        if let Some(to) = find(WHOLE, rest) {
            return Some(format!("{}{layer}.{to}", blocks[1]));
        }
        let (module, kind) = rest.rsplit_once('.')?;
        let to = self.modules.iter().find_map(|modules| find(modules, module))?;
        Some(format!("{}{layer}.{to}.{kind}", blocks[1]))
    }

    /// Returns true if the rows of a tensor, named in Hugging Face's form, are interleaved by heads.
    pub(crate) fn is_interleaved(&self, name: &str) -> bool {
        self.interleaves_heads && (name.contains(".q_proj.") || name.contains(".k_proj."))
    }

    /// Returns the shape in which a tensor of a file is used: the gate of a shared expert is stored as a vector, or as its one row.
    pub(crate) fn shape_of(name: &str, stored: &[usize]) -> Vec<usize> {
        match stored {
            [columns] if Self::is_shared_gate(name) => vec![1, *columns],
            _ => stored.to_vec(),
        }
    }

    /// Returns true if a tensor, named in Hugging Face's form, is the gate of a shared expert.
    pub(crate) fn is_shared_gate(name: &str) -> bool {
        name.strip_suffix(".weight").is_some_and(|module| module.ends_with(SHARED_GATE))
    }

    /// Returns true if a tensor, named in Hugging Face's form, is a matrix or a stack of matrices that may be stored in blocks. Routers and
    /// biases are f32: a router's error chooses other experts.
    pub(crate) fn is_matrix(name: &str) -> bool {
        let Some(module) = name.strip_suffix(".weight") else { return false };
        let others = [SHARED_GATE, "block_sparse_moe.gate", "mlp.gate", "mlp.router"];
        !others.iter().any(|other| module.ends_with(&format!(".{other}")))
    }

    /// Returns true if a tensor, named in Hugging Face's form, is a stack of matrices of experts.
    pub(crate) fn is_stack(name: &str) -> bool {
        name.contains(".experts.") && name.ends_with(".weight")
    }

    /// Returns the number that is added to the elements of a tensor, named in Hugging Face's form.
    pub(crate) fn shift(&self, name: &str) -> f32 {
        if self.shifts_norms && name.ends_with("norm.weight") { 1.0 } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for architecture in &Architecture::ALL {
            let mut names: Vec<String> = OUTSIDE.map(|(module, _)| format!("{module}.weight")).to_vec();
            names.push("model.layers.3.self_attn.sinks".to_owned());
            for (module, _) in architecture.modules.iter().copied().flatten() {
                names.extend(["weight", "bias"].map(|kind| format!("model.layers.12.{module}.{kind}")));
            }
            for name in names {
                let stored = architecture.gguf_name(&name).unwrap();
                assert_eq!(architecture.hf_name(&stored).as_deref(), Some(&*name), "{stored}");
            }
        }
        let qwen2 = Architecture::called("qwen2").next().unwrap();
        assert_eq!(qwen2.hf_name("blk.0.ssm_in.weight"), None);
        assert_eq!(
            qwen2.hf_name("blk.0.ffn_gate.1.weight"),
            None,
            "Mixtral alone has files with single experts"
        );
    }

    #[test]
    fn experts_of_old_files_have_their_own_names() {
        let mixtral = Architecture::of(LlamaFamily::Mixtral).unwrap();
        let name = mixtral.hf_name("blk.3.ffn_down.7.weight");
        assert_eq!(name.as_deref(), Some("model.layers.3.block_sparse_moe.experts.7.w2.weight"));
        assert_eq!(mixtral.hf_name("blk.3.ffn_down.x.weight"), None);
        assert_eq!(mixtral.hf_name("blk.3.ffn_down.weight"), None);
    }
}
