//! Text generation with a key-value cache: the prompt in one forward, then one token at a time.

use lockstep_engine::UnitParameters;
use lockstep_graph::{Batch, KeyValueCache, Replay};
use lockstep_model::{HeadOutput, RecordedModel};
use lockstep_plan::{DType, MemoryCategory};
use lockstep_tensor::{Buffer, Tensor, TensorError, View};

use crate::{InferError, LoadedModel, Sampler};

/// A generator that continues one sequence.
pub struct Generator<'m> {
    model: &'m LoadedModel,
    /// Weights that stay in the model's files.
    in_place: Vec<Option<View<'m>>>,
    /// Keys and values of each layer, `[capacity, key/value width]`, in the model's type.
    caches: Vec<[Tensor; 2]>,
    filled: usize,
    capacity: usize,
    /// Number of recent tokens to read again when the cache is full; `None` makes a full cache an error.
    kept: Option<usize>,
    decode: Forward,
    /// The logits in f32, `[vocabulary]`.
    widened: Tensor,
    logits: Vec<f32>,
}

/// The programs for a fixed number of tokens, with the memory they run in.
struct Forward {
    programs: RecordedModel,
    /// Frames of units with even and with odd numbers: a unit reads the output of the one before.
    frames: [Buffer; 2],
    workspace: Buffer,
    ids: Tensor,
    positions: Tensor,
    constants: Vec<Tensor>,
}

impl<'m> Generator<'m> {
    /// Creates a generator with a cache for `capacity` tokens, prompt included.
    ///
    /// # Errors
    /// If `capacity` exceeds the model's positions, or memory runs out.
    pub fn new(model: &'m LoadedModel, capacity: usize) -> Result<Self, InferError> {
        let allowed = model.config.max_position_embeddings();
        if capacity > allowed {
            return Err(InferError::TooLong { tokens: capacity, allowed });
        }
        let width = model.config.num_key_value_heads() * model.config.head_dim();
        let cache =
            || Tensor::zeros(&model.arena, model.dtype, [capacity, width], MemoryCategory::Activations);
        let caches = (0..model.config.num_hidden_layers())
            .map(|_| Ok([cache()?, cache()?]))
            .collect::<Result<_, TensorError>>()?;
        let decode = Forward::new(model, 1, Reach::Logits)?;
        let logits = vec![0.0; model.config.vocab_size()];
        let widened = Tensor::zeros(&model.arena, DType::F32, [logits.len()], MemoryCategory::Activations)?;
        let in_place = model.weights.in_place();
        Ok(Self { model, in_place, caches, filled: 0, capacity, kept: None, decode, widened, logits })
    }

    /// Lets generation continue when the cache is full: it is cleared, and the last `kept` tokens are read again as
    /// if none had preceded them. `kept` is clamped to at least 1 and less than the capacity.
    #[must_use]
    pub fn sliding(mut self, kept: usize) -> Self {
        self.kept = Some(kept.clamp(1, self.capacity.saturating_sub(1).max(1)));
        self
    }

    /// Reads the prompt, then generates up to `new_tokens` tokens. It passes each to `emit` and stops early if that
    /// returns [`ControlFlow::Break`](std::ops::ControlFlow).
    ///
    /// # Errors
    /// If the prompt is empty, if the tokens exceed the capacity without [`Generator::sliding`], if memory runs out,
    /// or if `emit` fails.
    pub fn generate<E: From<InferError>>(
        &mut self,
        prompt: &[u32],
        new_tokens: usize,
        sampler: &mut Sampler,
        mut emit: impl FnMut(u32) -> Result<std::ops::ControlFlow<()>, E>,
    ) -> Result<(), E> {
        if prompt.is_empty() {
            return Err(InferError::EmptyPrompt.into());
        }
        let tokens = self.filled + prompt.len() + new_tokens;
        if self.kept.is_none() && tokens > self.capacity + 1 {
            return Err(InferError::TooLong { tokens, allowed: self.capacity }.into());
        }
        if new_tokens == 0 {
            return Ok(());
        }
        let fits = prompt.len() <= self.capacity - self.filled;
        let mut recent = prompt[if fits { 0 } else { self.forget(prompt.len()) }..].to_vec();
        self.read(&recent)?;
        for remaining in (0..new_tokens).rev() {
            let id = sampler.draw(&self.logits);
            if emit(id)?.is_break() || remaining == 0 {
                break;
            }
            recent.push(id);
            if self.filled < self.capacity {
                self.step(id)?;
            } else {
                recent.drain(..self.forget(recent.len()));
                self.read(&recent)?;
            }
        }
        Ok(())
    }

    /// Clears the cache. Returns how many of `tokens` tokens to skip, from the first on, when they are read again.
    fn forget(&mut self, tokens: usize) -> usize {
        self.filled = 0;
        tokens.saturating_sub(self.kept.unwrap_or(self.capacity))
    }

    /// Returns the logits that follow the last token read, f32 `[vocabulary]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Reads a prompt without generating.
    ///
    /// # Errors
    /// If the prompt is empty, if it does not fit in the cache, or if memory runs out.
    pub fn read(&mut self, prompt: &[u32]) -> Result<(), InferError> {
        if prompt.is_empty() {
            return Err(InferError::EmptyPrompt);
        }
        let tokens = self.filled + prompt.len();
        if tokens > self.capacity {
            return Err(InferError::TooLong { tokens, allowed: self.capacity });
        }
        // Chunks bound the memory of activations, and change no bit.
        let mut prefill: Option<Forward> = None;
        for chunk in prompt.chunks(self.model.chunk_tokens) {
            prefill = prefill.filter(|forward| forward.tokens() == chunk.len());
            let forward = match prefill {
                Some(forward) => forward,
                None => {
                    // Freed memory of chunks of another length is of no use.
                    self.model.arena.trim();
                    Forward::new(self.model, chunk.len(), Reach::Blocks)?
                }
            };
            self.forward(Some(&forward), chunk)?;
            prefill = Some(forward);
        }
        Ok(())
    }

    /// Reads one token.
    ///
    /// # Errors
    /// If a collective fails; infallible on one rank.
    ///
    /// # Panics
    /// If the cache is full.
    pub fn step(&mut self, id: u32) -> Result<(), InferError> {
        self.forward(None, &[id])
    }

    /// Runs `ids` through the embedding and the blocks of `prefill`; without it, one token through those of a decoding step. Runs
    /// the last of them through the head of a decoding step, which is recorded for one token, and reads its logits.
    fn forward(&mut self, prefill: Option<&Forward>, ids: &[u32]) -> Result<(), InferError> {
        let Self { model, in_place, caches, filled, decode, widened, logits, .. } = self;
        let forward = prefill.unwrap_or(decode);
        let positions: Vec<u32> = (*filled..*filled + ids.len()).map(|position| position as u32).collect();
        forward.ids.view().write(ids);
        forward.positions.view().write(&positions);
        let programs = &forward.programs;
        let head = programs.units() - 1;
        let output = |unit: usize| programs.program(unit).output(forward.frame(unit));
        for unit in 0..head {
            let cache = unit.checked_sub(1).map(|layer| KeyValueCache {
                keys: caches[layer][0].view(),
                values: caches[layer][1].view(),
                filled: *filled,
            });
            let input = unit.checked_sub(1).map(output);
            let held = model.weights.begin(&*model.queue, unit)?;
            let weights = model.weights.weights(in_place, held.as_deref());
            let parameters = UnitParameters { ids: programs.unit_parameters(unit), weights, gradients: None };
            programs.program(unit).forward(&forward.replay(unit, &parameters, model, input, cache))?;
        }
        let last = output(head - 1).rows(ids.len() - 1..ids.len());
        let held = model.weights.begin(&*model.queue, head)?;
        let weights = model.weights.weights(in_place, held.as_deref());
        let parameters = UnitParameters { ids: programs.unit_parameters(head), weights, gradients: None };
        let program = decode.programs.program(head);
        program.forward(&decode.replay(head, &parameters, model, Some(last), None))?;
        let out = program.output(decode.frame(head));
        model.queue.cast(out.reshape([logits.len()]), widened.view());
        widened.view().read(logits).wait();
        *filled += ids.len();
        Ok(())
    }
}

/// Units that a forward runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// The embedding and the blocks.
    Blocks,
    /// All units.
    Logits,
}

impl Forward {
    fn new(model: &LoadedModel, tokens: usize, reach: Reach) -> Result<Self, TensorError> {
        let programs = model.record(1, tokens, HeadOutput::Logits);
        let arena = &model.arena;
        // Logits of all tokens of a chunk would be the largest value by far.
        let units = programs.units() - usize::from(reach == Reach::Blocks);
        let most = |bytes: &dyn Fn(usize) -> usize| (0..units).map(bytes).max().unwrap_or(0);
        let frame_bytes = most(&|unit| programs.program(unit).frame_bytes());
        let workspace_bytes = most(&|unit| programs.program(unit).workspace_bytes());
        let frame = || arena.allocate(frame_bytes, MemoryCategory::Activations);
        let input = || Tensor::zeros(arena, DType::U32, [tokens], MemoryCategory::Activations);
        Ok(Self {
            frames: [frame()?, frame()?],
            workspace: arena.allocate(workspace_bytes, MemoryCategory::Workspace)?,
            ids: input()?,
            positions: input()?,
            constants: programs
                .constants()
                .iter()
                .map(|constant| constant.allocate(arena))
                .collect::<Result<_, TensorError>>()?,
            programs,
        })
    }

    /// Number of tokens.
    fn tokens(&self) -> usize {
        self.ids.view().elements()
    }

    fn frame(&self, unit: usize) -> &Buffer {
        &self.frames[unit % 2]
    }

    fn replay<'a>(
        &'a self,
        unit: usize,
        parameters: &'a UnitParameters<'a>,
        model: &'a LoadedModel,
        input: Option<View<'a>>,
        cache: Option<KeyValueCache<'a>>,
    ) -> Replay<'a> {
        Replay {
            queue: &*model.queue,
            parameters,
            batch: Batch {
                ids: self.ids.view(),
                labels: None,
                positions: self.positions.view(),
                document_starts: None,
                dropout_keys: None,
                constants: &self.constants,
                inputs: &[],
            },
            input,
            frame: self.frame(unit),
            output: None,
            workspace: &self.workspace,
            first_dropout_site: 0,
            cache,
            peers: None,
            grid: None,
            expert_peers: None,
            sequence_peers: None,
            replicas: None,
            context: None,
            communication_buffer: None,
            router_margin: None,
            trace: None,
        }
    }
}
