//! Valid inputs from which mutations start: small, with every feature of their format once.

use lockstep_data::{IdType, TokenFileHeader};
use lockstep_model::ModelConfig;
use lockstep_plan::DType;

fn safetensors_file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 1);
    bytes
}

/// Returns whole safetensors files.
pub fn safetensors() -> Vec<Vec<u8>> {
    let two = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
        "b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}"#;
    let odd = r#"{"empty":{"dtype":"U8","shape":[0,7],"data_offsets":[0,0]},"scalar":{"dtype":"I64","shape":[],
        "data_offsets":[0,8]},"half":{"dtype":"F4","shape":[4],"data_offsets":[8,10]}}   "#;
    vec![safetensors_file("{}", 0), safetensors_file(two, 22), safetensors_file(odd, 10)]
}

/// Returns whole GGUF files: an empty one, and one with metadata of several types, a quantized and a dense tensor, and a stack of experts.
pub fn gguf() -> Vec<Vec<u8>> {
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let begin = |tensors: u64, pairs: u64| {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend(tensors.to_le_bytes());
        out.extend(pairs.to_le_bytes());
        out
    };
    let mut file = begin(3, 4);
    text(&mut file, "general.architecture");
    file.extend(8_u32.to_le_bytes());
    text(&mut file, "llama");
    text(&mut file, "general.alignment");
    file.extend([4_u32, 32].iter().flat_map(|word| word.to_le_bytes()));
    text(&mut file, "llama.expert_count");
    file.extend([4_u32, 3].iter().flat_map(|word| word.to_le_bytes()));
    text(&mut file, "tokenizer.ggml.tokens");
    file.extend([9_u32, 8, 2, 0].iter().flat_map(|word| word.to_le_bytes()));
    text(&mut file, "a");
    text(&mut file, "bc");
    for (name, dims, kind, offset) in [
        ("a.weight", &[32_u64, 2][..], 8_u32, 0_u64),
        ("b.weight", &[3], 0, 96),
        ("blk.0.ffn_up_exps.weight", &[32, 2, 3], 39, 128),
    ] {
        text(&mut file, name);
        file.extend((dims.len() as u32).to_le_bytes());
        file.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    file.resize(file.len().next_multiple_of(32) + 128 + 6 * 17, 1);
    vec![begin(0, 0), file]
}

/// Returns quantized models: a line with the `quantization_config`, and the file of tensors.
pub fn quantized() -> Vec<Vec<u8>> {
    macro_rules! seed {
        ($name:literal) => {{
            let config = include_str!(concat!("../../../tests/fixtures/quantized/", $name, "/config.json"));
            let file =
                include_bytes!(concat!("../../../tests/fixtures/quantized/", $name, "/model.safetensors"));
            let mut config: serde_json::Value = serde_json::from_str(config).unwrap_or_default();
            let mut bytes = config["quantization_config"].take().to_string().into_bytes();
            bytes.push(b'\n');
            bytes.extend(file);
            bytes
        }};
    }
    vec![
        seed!("gptq"),
        seed!("gptq_act_order"),
        seed!("awq"),
        seed!("packed_asymmetric"),
        seed!("int8_channels"),
        seed!("llm_int8"),
        seed!("fp8_blocks"),
        seed!("fp8_channels"),
        seed!("nf4_nested"),
        seed!("mxfp4"),
    ]
}

/// Returns frames as ranks exchange them.
pub fn frames() -> Vec<Vec<u8>> {
    vec![Vec::new(), lockstep_comm::sample_frames()]
}

/// Returns checkpoint manifests without their seals.
pub fn manifests() -> Vec<Vec<u8>> {
    let hash = "ab".repeat(32);
    let head = |rest: &str| {
        format!(
            r#"{{"format":"lockstep-checkpoint","version":1,"step":7,"samples_consumed":448,"seed":1337,
"config_blake3":"{hash}","config":{{"model":{{"model_type":"llama"}}}},"plan":null,"state":{{"updates":7}},{rest}"#
        )
        .into_bytes()
    };
    let whole = format!(
        r#""kernels":"avx2","files":{{"rank-00000.safetensors":{{"bytes":1000,"blake3":"{hash}"}}}},
"tensors":[{{"name":"a","kind":"parameter","dtype":"f32","shape":[4,6],"slices":[{{"file":"rank-00000.safetensors",
"offset":8,"start":[0,0],"shape":[4,6],"blake3":"{hash}"}}]}}]"#
    );
    let cut = format!(
        r#""files":{{"x":{{"bytes":99,"blake3":"{hash}"}},"y":{{"bytes":99,"blake3":"{hash}"}}}},
"tensors":[{{"name":"a","kind":"exp_avg","dtype":"bf16","shape":[4,6],"slices":[
{{"file":"x","offset":0,"start":[0],"shape":[5],"blake3":"{hash}"}},
{{"file":"y","offset":0,"start":[5],"shape":[19],"blake3":"{hash}"}}]}},
{{"name":"a","kind":"momentum","dtype":"f32","shape":[4,2],"slices":[
{{"file":"x","offset":10,"start":[0,0],"shape":[4,1],"blake3":"{hash}"}},
{{"file":"y","offset":38,"start":[0,1],"shape":[4,1],"blake3":"{hash}"}}]}}]"#
    );
    vec![head(r#""files":{},"tensors":[]"#), head(&whole), head(&cut)]
}

/// Returns headers of token cache files.
pub fn token_files() -> Vec<Vec<u8>> {
    let header = |id_type, vocab_size| TokenFileHeader {
        id_type,
        tokens: 14,
        vocab_size,
        documents: 2,
        contexts: 1,
        content_key: blake3::hash(b"corpus"),
        payload_hash: blake3::hash(b"ids"),
    };
    let narrow = header(IdType::U16, 256).to_bytes().to_vec();
    let wide = header(IdType::U32, 1 << 17).to_bytes().to_vec();
    vec![narrow, [wide, vec![0; 56]].concat()]
}

/// Returns indexes of 7 two-byte tokens: one with empty sequences, one with modes, one without documents.
pub fn indexes() -> Vec<Vec<u8>> {
    let index = |lengths: &[u32], borders: &[u64], modes: usize| {
        let mut bytes = b"MMIDIDX\0\0".to_vec();
        bytes.extend(1_u64.to_le_bytes());
        bytes.push(8);
        bytes.extend((lengths.len() as u64).to_le_bytes());
        bytes.extend((borders.len() as u64).to_le_bytes());
        bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        let ends =
            lengths.iter().scan(0, |end, &length| Some(std::mem::replace(end, *end + 2 * u64::from(length))));
        bytes.extend(ends.flat_map(u64::to_le_bytes));
        bytes.extend(borders.iter().flat_map(|border| border.to_le_bytes()));
        bytes.resize(bytes.len() + modes, 0);
        bytes
    };
    vec![index(&[3, 0, 4, 0], &[0, 1, 1, 4], 0), index(&[3, 4], &[0, 2], 2), index(&[7], &[0], 0)]
}

/// Returns Parquet files, one for each codec and page version.
pub fn parquet_files() -> Vec<Vec<u8>> {
    macro_rules! files {
        ($($name:literal),*) => {
            vec![$(include_bytes!(concat!("../../../tests/fixtures/data/", $name, ".parquet")).to_vec()),*]
        };
    }
    files!["snappy-1", "snappy-2", "gzip-1", "gzip-2", "brotli-1", "lz4-2", "zstd-1", "zstd-2"]
}

/// Returns JSON lines with documents.
pub fn json_lines() -> Vec<Vec<u8>> {
    let nested =
        r#"{"meta":{"a":[1,2.5e3,null,{"b":true}],"text":"inner"},"text":"a\n\"b\" \ud83e\udd80 ü","n":-0}"#;
    let chat =
        r#"{"messages":[{"role":"user","content":"2+2?"},{"role":"assistant","content":"4","n":1}],"id":7}"#;
    let pair = r#"{"prompt":"2+2=","completion":"4"}"#;
    vec![
        br#"{"text":"plain"}"#.to_vec(),
        nested.into(),
        br#" { "id" : 1 , "text" : "" } "#.to_vec(),
        chat.into(),
        pair.into(),
    ]
}

/// Returns tokenizers with each of the four kinds of model, surrounded by every kind of table.
pub fn tokenizers() -> Vec<Vec<u8>> {
    let around = |normalizer: &str, pre_tokenizer: &str, decoder: &str, model: &str| {
        format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{{"id":9,"content":"<|endoftext|>",
"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],"normalizer":{normalizer},
"pre_tokenizer":{pre_tokenizer},"post_processor":{{"type":"TemplateProcessing","single":[{{"SpecialToken":{{"id":"A",
"type_id":0}}}},{{"Sequence":{{"id":"A","type_id":0}}}}],"pair":[{{"Sequence":{{"id":"A","type_id":0}}}}],
"special_tokens":{{"A":{{"id":"A","ids":[0],"tokens":["A"]}}}}}},"decoder":{decoder},"model":{model}}}"#
        )
        .into_bytes()
    };
    let byte_level = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
    let split = r#"{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{L}+|\\s+"},
"behavior":"Isolated","invert":false},{"type":"Digits","individual_digits":true}]}"#;
    let metaspace = r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#;
    let normalizers = r#"{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Replace","pattern":{"String":" "},
"content":"▁"},{"type":"Strip","strip_left":true,"strip_right":false},{"type":"Lowercase"},{"type":"Prepend",
"prepend":"▁"}]}"#;
    let decoders = r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},
{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#;
    let bpe = r###"{"type":"BPE","dropout":null,"unk_token":"A","continuing_subword_prefix":null,
"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{"A":0,"l":1,"a":2,"ll":3,"Ġ":4,"Al":5},
"merges":[["l","l"],["A","l"]]}"###;
    let unigram = r#"{"type":"Unigram","unk_id":0,"vocab":[["A",0.0],["▁",-1.5],["l",-2.0],["▁a",-2.5],["<0x0A>",-3.0]],
"byte_fallback":true}"#;
    let word_piece = r###"{"type":"WordPiece","unk_token":"A","continuing_subword_prefix":"##",
"max_input_chars_per_word":100,"vocab":{"A":0,"a":1,"##l":2,"wait":3}}"###;
    let word_level = r#"{"type":"WordLevel","vocab":{"A":0,"All":1,"ranks":2},"unk_token":"A"}"#;
    vec![
        around("null", byte_level, byte_level, bpe),
        around(normalizers, metaspace, decoders, unigram),
        around(
            r#"{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,
"lowercase":true}"#,
            r#"{"type":"BertPreTokenizer"}"#,
            r###"{"type":"WordPiece","prefix":"##","cleanup":true}"###,
            word_piece,
        ),
        around(r#"{"type":"NFKD"}"#, split, "null", word_level),
    ]
}

/// Returns `adapter_config.json` files as PEFT writes them, with and without options.
pub fn adapter_configs() -> Vec<Vec<u8>> {
    let plain = r#"{"peft_type":"LORA","r":8,"lora_alpha":16,"lora_dropout":0.05,"bias":"none","use_rslora":false,
"target_modules":["q_proj","v_proj"],"modules_to_save":null,"rank_pattern":{},"use_dora":false,"task_type":"CAUSAL_LM"}"#;
    let short =
        r#"{"peft_type":"LORA","r":1,"lora_alpha":0.5,"use_rslora":true,"target_modules":"all-linear"}"#;
    [plain, short].map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Returns a preset of each family as `config.json`, and two more with features that the presets lack.
pub fn model_configs() -> Vec<Vec<u8>> {
    let presets = [
        "baby-gpt",
        "llama3-8b",
        "mistral-7b",
        "qwen3-0.6b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "kimi-k2",
        "pythia-14m",
        "falcon-40b",
        "opt-350m",
        "bloom-560m",
    ];
    let mut texts: Vec<Vec<u8>> = presets
        .iter()
        .filter_map(|name| ModelConfig::preset(name).ok())
        .map(|config| config.to_json(DType::BF16).to_string().into_bytes())
        .collect();
    let qwen2 = r#"{"model_type":"qwen2","hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,
"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":300,"max_position_embeddings":128,"rope_theta":1e6,
"rope_scaling":null,"sliding_window":null,"use_sliding_window":false,"eos_token_id":[1,2],"tie_word_embeddings":true}"#;
    let gpt2 = r#"{"model_type":"gpt2","n_embd":48,"n_layer":2,"n_head":3,"n_positions":32,"n_inner":null,
"vocab_size":100,"activation_function":"gelu_new","layer_norm_epsilon":1e-5,"embd_pdrop":0.1}"#;
    texts.extend([qwen2.into(), gpt2.into()]);
    texts
}

/// Returns run configurations.
pub fn run_files() -> Vec<Vec<u8>> {
    let most = r#"[model]
preset = "llama-15m"
hidden_size = 64
rope_scaling = { rope_type = "linear", factor = 2.0 }
[data]
train = ["a/*.txt", { path = "b.jsonl", weight = 0.3 }]
valid = ["c.txt"]
format = "auto"
tokenizer = "bytes"
order = "sequential"
packing = "documents"
token_type = "u16"
[train]
steps = 100
global_batch = 8
micro_batch = 4
seq_len = 64
seed = 7
precision = "bf16"
max_grad_norm = 1.0
dropout = 0.1
threads = 2
[optimizer]
kind = "sgd"
lr = 3e-4
momentum = 0.9
weight_decay = 0.1
decay = ["*.mlp.*"]
[schedule]
kind = "wsd"
warmup_steps = 10
decay_steps = 20
min_lr_ratio = 0.1
[parallel]
recompute = "full"
[checkpoint]
dir = "out"
every = 10
keep = 2
[metrics]
jsonl = false
"#;
    let dotted = "train.steps = 3\noptimizer.betas = [0.9, 0.99]\nmodel.model_type = \"llama\"\nmodel.\"hidden_size\" = 0x40\n";
    vec![Vec::new(), most.into(), dotted.into()]
}

/// Returns cluster files.
pub fn clusters() -> Vec<Vec<u8>> {
    let most = r#"name = "lab"
software = "fsdp"
[[node]]
count = 2
devices = 8
host_memory = "1.5TiB"
host_gb_per_s = 24
disk = "30TB"
disk_gb_per_s = 12.5
price_per_hour = 32.5
hours_between_failures = 6e3
[node.device]
like = "a100-80gb-sxm"
name = "a100-40gb"
memory = "39.5GiB"
memory_gb_per_s = 1555
peak_tflops = { bf16 = 312, f32 = 19.5 }
[node.device.efficiency]
product = 0.8
half_shape = [16, 64, 16]
tile = { rows = 128, columns = 128, units = 108 }
attention = 0.4
scores = 0.3
stream = 0.8
launch_us = 5
measured = { "RMSNorm forward" = 1200 }
[[node]]
device = "h100-sxm"
[[link]]
like = "nvlink4"
in_switch = false
[[link]]
name = "rack"
joins = 16
gb_per_s = 25
latency_us = 20
[[link]]
like = "hdr-200g"
efficiency = 0.9
start_us = 3
fill = 0.3
"#;
    let host = r#"link = { gb_per_s = 6, latency_us = 0.5, joins = "all" }
[node]
devices = 2
device = { is_host = true, memory = 4096, memory_gb_per_s = 5, peak_tflops.f32 = 0.1, efficiency.tile = false }
alone = { is_host = true, memory = 4096, memory_gb_per_s = 9, peak_tflops.f32 = 0.2 }
"#;
    let torus =
        "node = [{ count = 16, devices = 4, device = \"tpu-v4\" }]\nlink = [{ like = \"ici\", torus = 2 }]\n";
    vec![most.into(), host.into(), torus.into(), b"node.device = 'h100-sxm'".into()]
}

/// Returns records of runs.
pub fn run_records() -> Vec<Vec<u8>> {
    let rows = r#"{"name":"<b>&amp;</b>","step":1,"loss":2.5,"grad_norm":1.5,"lr":1e-3,"tokens_seen":64,"step_ms":10.5}
{"step":1,"eval_loss":2.5,"eval_tokens":64,"eval_ms":1.0}
{"step":2,"loss":null,"skipped":true,"memory":{"parameters":400,"peak":500},"checkpoint_stall_ms":3.5}
"#;
    vec![rows.into(), b"{\"step\":3,\"loss\":0}".into()]
}

/// Returns files of the flight recorder.
pub fn flight_records() -> Vec<Vec<u8>> {
    let call = |number: u64, kind: &str, index: u64, done: &str| {
        format!(
            r#"{{"number":{number},"group":{{"index":{index},"first":0,"size":2}},"sequence":{number},"what":"{kind}","kind":"{kind}","op":null,"dtype":"f32","elements":8,"root":1,"detail":0,"posted_us":9,"met_us":null,"done_us":{done},"caller":"a.rs:1"}}"#
        )
    };
    let dump = |first: &str, second: &str| {
        format!(
            r#"{{"format":"lockstep flight recorder","version":1,"host":"a","written_us":99,"ended":{{"message":"m","lost":null}},"world_size":3,"ranks":[{{"rank":0,"operations":[{first}]}},{{"rank":2,"operations":[{second}]}}]}}"#
        )
    };
    let both = |kind: &str| {
        [call(3, "barrier", 0, "12"), call(4, kind, 1, "null"), call(5, "send", 0, "null")].join(",")
    };
    vec![
        dump(&both("reduce"), &both("reduce")).into(),
        dump(&both("reduce"), &both("gather")).into(),
        dump(&both("receive"), "").into(),
    ]
}

/// Returns plan files.
pub fn plans() -> Vec<Vec<u8>> {
    let whole = r#"{"version":1,"model":"ab12","mesh":{"pipeline":2,"replicate":2,"context":2,"tensor":2},"micro_batch":1,
"schedule":{"kind":"zb_v","chunks":2},"stages":[2,2,1,3],"recompute":"selective","sequence_parallel":true,"tensor_chunks":3,
"context_method":"all_gather","zero_stage":0}"#;
    let rows = r#"{"version":1,"mesh":{"pipeline":2},"micro_batch":8,"stages":[4,4],
"schedule":{"rows":["F0,F1,B0,B1","F0,B0,F1,B1"]}}"#;
    let experts = r#"{"version":1,"mesh":{"shard":2,"tensor":2,"expert":4},"micro_batch":2,"stages":[8],"zero_stage":1}"#;
    let square = r#"{"version":1,"mesh":{"tensor":4},"micro_batch":4,"stages":[8],"tensor_layout":"2d",
"predicted":{"memory":[{"ranks":"0-1,3","bytes":{"parameters":64,"optimizer":128}},{"ranks":"2","bytes":{}}]}}"#;
    vec![whole.into(), rows.into(), experts.into(), square.into()]
}

/// Returns user-defined schedules for two ranks.
pub fn schedules() -> Vec<Vec<u8>> {
    vec![
        b"F0,F1,,B0,B1\n,F0,B0,F1,B1\n".into(),
        b"0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1,1W1".into(),
        b"0F0,3F0,3B0,0B0\n1F0,2F0,(2B0;1B0)OVERLAP_F_B".into(),
    ]
}
