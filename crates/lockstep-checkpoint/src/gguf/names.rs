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
    modules: &'static [(&'static str, &'static str)],
}

/// Modules outside blocks.
const OUTSIDE: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

const LLAMA: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const PHI3: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const GEMMA2: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const PLAIN: Architecture =
    Architecture { name: "", families: &[], interleaves_heads: false, shifts_norms: false, modules: LLAMA };

impl Architecture {
    /// The architectures that are read and written.
    pub(crate) const ALL: [Self; 5] = [
        Self {
            name: "llama",
            families: &[LlamaFamily::Llama, LlamaFamily::Mistral],
            interleaves_heads: true,
            ..PLAIN
        },
        Self { name: "qwen2", families: &[LlamaFamily::Qwen2], ..PLAIN },
        Self { name: "qwen3", families: &[LlamaFamily::Qwen3], ..PLAIN },
        Self { name: "phi3", families: &[LlamaFamily::Phi3], modules: PHI3, ..PLAIN },
        Self {
            name: "gemma2",
            families: &[LlamaFamily::Gemma2],
            shifts_norms: true,
            modules: GEMMA2,
            ..PLAIN
        },
    ];

    /// Returns the architecture called `name`.
    pub(crate) fn find(name: &str) -> Option<&'static Self> {
        const { &Self::ALL }.iter().find(|architecture| architecture.name == name)
    }

    /// Returns the architecture of a family.
    pub(crate) fn of(family: LlamaFamily) -> Option<&'static Self> {
        const { &Self::ALL }.iter().find(|architecture| architecture.families.contains(&family))
    }

    /// Returns the names of all architectures, for messages.
    pub(crate) fn names() -> String {
        Self::ALL.map(|architecture| architecture.name).join(", ")
    }

    /// Returns the name of a tensor in Hugging Face's form; `None` if the architecture has no such tensor.
    pub(crate) fn hf_name(&self, name: &str) -> Option<String> {
        self.renamed(name, ["blk.", "model.layers."], |&(hf, gguf)| [gguf, hf])
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
        let (layer, module) = module.strip_prefix(blocks[0])?.split_once('.')?;
        Some(format!("{}{layer}.{}.{kind}", blocks[1], find(self.modules, module)?))
    }

    /// Returns true if the rows of a tensor, named in Hugging Face's form, are interleaved by heads.
    pub(crate) fn is_interleaved(&self, name: &str) -> bool {
        self.interleaves_heads && (name.contains(".q_proj.") || name.contains(".k_proj."))
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
            for (module, _) in architecture.modules {
                let name = format!("model.layers.12.{module}.weight");
                let stored = architecture.gguf_name(&name).unwrap();
                assert_eq!(architecture.hf_name(&stored).as_deref(), Some(&*name), "{stored}");
            }
            for (module, _) in OUTSIDE {
                let name = format!("{module}.weight");
                let stored = architecture.gguf_name(&name).unwrap();
                assert_eq!(architecture.hf_name(&stored).as_deref(), Some(&*name), "{stored}");
            }
        }
        assert_eq!(Architecture::find("qwen2").unwrap().hf_name("blk.0.ssm_in.weight"), None);
    }
}
