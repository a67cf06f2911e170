//! A training step allocates nothing once the run is warm: not in kernels, not for metrics or progress, not in the prefetch
//! thread. Every allocation of the process is counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockstep_config::{Resume, RunConfig};
use lockstep_engine::{Engine, Ranks};
use lockstep_launch::interrupt::Interrupt;
use lockstep_observe::progress::Progress;
use lockstep_train::{Error, StepObserver, train_observed};

/// The system's allocator with a counter.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Index of the first step whose backward allocates nothing, nor any later step.
const COUNTED_FROM: usize = 2;

/// Number of allocations of the process at the end of each step's backward.
struct Counts(Vec<u64>);

impl StepObserver for Counts {
    fn gradients_ready(&mut self, _: u64, _: &mut Engine) -> Result<(), Error> {
        if self.0.len() == COUNTED_FROM {
            // The saving thread has the lowest priority. On a busy machine it may start late and allocate its thread-locals then.
            std::thread::sleep(Duration::from_millis(100));
        }
        self.0.push(ALLOCATIONS.load(Ordering::Relaxed));
        Ok(())
    }
}

const MODELS: [(&str, &str); 3] = [
    ("gpt2", "preset = \"baby-gpt\"\nn_layer = 2\nn_embd = 96\nn_head = 3\nn_positions = 64\n"),
    (
        "llama",
        "preset = \"llama-15m\"\nnum_hidden_layers = 2\nhidden_size = 96\nintermediate_size = 160\n\
         num_attention_heads = 4\nnum_key_value_heads = 2\nmax_position_embeddings = 64\n",
    ),
    (
        "mixtral",
        "preset = \"mixtral-20m\"\nnum_hidden_layers = 2\nhidden_size = 96\nintermediate_size = 48\n\
         num_attention_heads = 4\nnum_key_value_heads = 2\nmax_position_embeddings = 64\nrouter_z_loss_coef = 0.01\n\
         expert_capacity_factor = 1.25\n",
    ),
];

/// A single test, because the counter covers the whole process.
#[test]
fn no_step_after_the_second_allocates() {
    const STEPS: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("text.txt"), "a rank of the mesh waits for the tape\n".repeat(400))
        .unwrap();
    for (name, model) in MODELS {
        for (precision, recompute, optimizer, residence) in [
            ("f32", "none", "adamw", "none"),
            ("bf16", "full", "muon", "none"),
            ("f16", "selective", "lion", "none"),
            ("bf16", "none", "adamw", "disk"),
        ] {
            // A copy for rollbacks would be in memory.
            let (rollback_after, io) = match (residence, name) {
                ("disk", "llama") => (0, ", io = \"threads\""),
                ("disk", _) => (0, ""),
                _ => (3, ""),
            };
            let text = format!(
                "[model]\n{model}[train]\nsteps = {STEPS}\nglobal_batch = 4\nmicro_batch = 2\nseq_len = 64\n\
                 precision = {precision:?}\ndropout = 0.1\nthreads = 2\nlog_every = 1\neval_every = 0\nspike_factor = 9\n\
                 rollback_after = {rollback_after}\n\
                 [optimizer]\nkind = {optimizer:?}\n[parallel]\nrecompute = {recompute:?}\n\
                 offload = {{ optimizer = {residence:?}, gradients = {residence:?}, parameters = {residence:?}, activations = {residence:?}{io} }}\n[data]\ntrain = [{:?}]\ncache_dir = {:?}\n\
                 [checkpoint]\ndir = {:?}\nevery = 0\n[metrics]\ndir = {:?}\n",
                dir.path().join("text.txt"),
                dir.path().join("cache"),
                dir.path().join(name),
                dir.path().join(name),
            );
            let config = RunConfig::parse(&text, "test", &[] as &[&str]).unwrap();
            let mut counts = Counts(Vec::with_capacity(STEPS));
            let show = |steps| Progress::as_lines(steps, Box::new(std::io::sink()));
            train_observed(
                &config,
                &Resume::Never,
                &Ranks::alone(),
                &Interrupt::default(),
                show,
                &mut counts,
            )
            .unwrap();
            // The windows after the third backward: the second step is over.
            let per_step: Vec<u64> = counts.0.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert!(
                per_step[COUNTED_FROM..].iter().all(|&count| count == 0),
                "{name}, {precision}: {per_step:?}"
            );
        }
    }
}
