//! Search space: all choices for a model, a batch and a number of devices.

use super::Candidate;
use lockstep_plan::schedule::Kind;
use lockstep_plan::{ContextMethod, Degrees, Facts, Offload, Recompute, Residence, ZeroStage};

/// Maximum tensor-parallel and context-parallel degree; beyond it, a rank's part of a matrix is too small for a device.
const MOST_SHARERS: usize = 64;
/// Maximum micro-batch size that is tried, in sequences.
const LARGEST_MICRO_BATCH: usize = 64;
/// Maximum stages per rank that are tried, if a schedule allows any number.
const MOST_CHUNKS: usize = 8;

/// Search space of a model on a number of devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Facts about the model and the batch; `world_size` is the number of devices.
    pub facts: Facts,
    /// Devices per node; shard groups within a node are tried as well.
    pub devices_of_a_node: usize,
    /// Micro-batch size in sequences; `None` to search for it.
    pub micro_batch: Option<usize>,
    /// True to try tensor parallelism without sequence parallelism as well. Sequence parallelism has the same communication volume and
    /// less memory and work; but on CPUs, collectives of rows cost more than they save.
    pub tries_whole_tokens: bool,
    /// Algorithms of context-parallel attention to try; only the first if the context degree is 1.
    pub context_methods: Vec<ContextMethod>,
    /// Offloads to try, where the engine supports them.
    pub offloads: Vec<Offload>,
}

impl Space {
    /// Returns every candidate.
    pub fn candidates(&self) -> Vec<Candidate> {
        let mut all = Vec::new();
        for degrees in self.meshes() {
            for &zero_stage in self.zero_stages(&degrees) {
                for micro_batch in self.micro_batches(&degrees) {
                    for sequence_parallel in self.sequence_parallel(&degrees) {
                        for context_method in self.methods(&degrees) {
                            for schedule in self.schedules(&degrees, micro_batch) {
                                let with = |recompute, offload| Candidate {
                                    degrees,
                                    zero_stage,
                                    micro_batch,
                                    sequence_parallel,
                                    context_method,
                                    schedule,
                                    recompute,
                                    offload,
                                };
                                for &offload in self.residences(&degrees, zero_stage) {
                                    let modes = [Recompute::None, Recompute::Selective, Recompute::Full];
                                    all.extend(modes.map(|recompute| with(recompute, offload)));
                                }
                            }
                        }
                    }
                }
            }
        }
        all
    }

    /// Returns true if a candidate is one of [`Space::candidates`].
    pub fn contains(&self, candidate: &Candidate) -> bool {
        let Candidate {
            degrees,
            zero_stage,
            micro_batch,
            sequence_parallel,
            context_method,
            schedule,
            recompute: _,
            offload,
        } = candidate;
        let Degrees { pipeline, replicate, shard, context, tensor, expert, expert_tensor } = *degrees;
        let Some(parts) = replicate.checked_mul(shard) else { return false };
        degrees.world_size() == Some(self.facts.world_size)
            && self.splits_tensors(tensor)
            && self.splits_sequences(context, tensor)
            && pipeline <= self.facts.units
            && self.facts.step.global_batch.is_multiple_of(parts)
            && self.shards(parts, tensor * context).any(|of| of == shard)
            && self.experts(shard, context, tensor).contains(&[expert, expert_tensor])
            && self.zero_stages(degrees).contains(zero_stage)
            && self.micro_batches(degrees).any(|size| size == *micro_batch)
            && self.sequence_parallel(degrees).contains(sequence_parallel)
            && self.methods(degrees).any(|method| method == *context_method)
            && self.schedules(degrees, *micro_batch).contains(schedule)
            && self.residences(degrees, *zero_stage).any(|one| one == offload)
    }

    /// Returns the offloads that are valid under a ZeRO stage. Weights are only offloaded if they are numbers and no rank keeps those that
    /// others update, gradients only if no other rank keeps the same ones.
    fn residences(&self, degrees: &Degrees, zero_stage: ZeroStage) -> impl Iterator<Item = &Offload> {
        let keeps_others =
            self.facts.has_quantized_weights || degrees.replicates_parameters(zero_stage.number());
        let has_own_gradients = degrees.replicate == 1 && !degrees.replicates_gradients(zero_stage.number());
        self.offloads.iter().filter(move |offload| {
            (offload.parameters == Residence::Memory || !keeps_others)
                && (offload.gradients == Residence::Memory || has_own_gradients)
        })
    }

    /// Returns every mesh of the devices.
    pub fn meshes(&self) -> Vec<Degrees> {
        let facts = &self.facts;
        let mut meshes = Vec::new();
        let tensors = || divisors(facts.world_size).filter(|tensor| self.splits_tensors(*tensor));
        for tensor in tensors() {
            let left = facts.world_size / tensor;
            for context in divisors(left).filter(|context| self.splits_sequences(*context, tensor)) {
                let left = left / context;
                for pipeline in divisors(left).filter(|pipeline| *pipeline <= facts.units) {
                    let parts = left / pipeline;
                    if !facts.step.global_batch.is_multiple_of(parts) {
                        continue;
                    }
                    for shard in self.shards(parts, tensor * context) {
                        let of = |expert, expert_tensor| Degrees {
                            pipeline,
                            replicate: parts / shard,
                            shard,
                            context,
                            tensor,
                            expert,
                            expert_tensor,
                        };
                        meshes.extend(
                            self.experts(shard, context, tensor)
                                .into_iter()
                                .map(|[expert, tensor]| of(expert, tensor)),
                        );
                    }
                }
            }
        }
        meshes
    }

    fn splits_tensors(&self, tensor: usize) -> bool {
        let Facts { intermediate, vocab, step, experts, .. } = self.facts;
        // Tensor-parallel ranks shard the tokens that they send to experts.
        let shares_tokens = experts == 0 || step.seq_len.is_multiple_of(tensor);
        (tensor == 1 || !(self.facts.step.updates_whole_matrices || self.facts.has_quantized_weights))
            && tensor <= MOST_SHARERS
            && self.facts.shards_heads(tensor)
            && intermediate.is_multiple_of(tensor)
            // A model without a vocabulary has nothing that tensor-parallel ranks shard.
            && (tensor == 1 || tensor <= vocab)
            && shares_tokens
    }

    fn splits_sequences(&self, context: usize, tensor: usize) -> bool {
        let seq_len = self.facts.step.seq_len;
        context == 1
            || (context <= MOST_SHARERS
                && seq_len.is_multiple_of(2 * context)
                && seq_len.is_multiple_of(context * tensor))
    }

    /// Returns the sizes of shard groups to try: 1, those within a node, and all data-parallel ranks.
    fn shards(&self, parts: usize, of_each: usize) -> impl Iterator<Item = usize> + use<> {
        let of_a_node = (self.devices_of_a_node / of_each.max(1)).max(1);
        let mut shards = vec![1];
        if !self.facts.step.updates_whole_matrices && parts > 1 {
            if of_a_node > 1 && of_a_node < parts && parts.is_multiple_of(of_a_node) {
                shards.push(of_a_node);
            }
            shards.push(parts);
        }
        shards.into_iter()
    }

    fn experts(&self, shard: usize, context: usize, tensor: usize) -> Vec<[usize; 2]> {
        let Facts { experts, expert_intermediate, experts_have_biases, .. } = self.facts;
        if experts == 0 {
            return vec![[1, 1]];
        }
        let mut degrees: Vec<[usize; 2]> = Vec::new();
        for expert_tensor in [1, tensor] {
            // Each part of an expert would add its whole biases.
            let is_cut_with_biases = expert_tensor > 1 && experts_have_biases;
            if is_cut_with_biases
                || !expert_intermediate.is_multiple_of(expert_tensor)
                || degrees.iter().any(|[_, of]| *of == expert_tensor)
            {
                continue;
            }
            let ranks = shard * context * tensor / expert_tensor;
            degrees.extend(
                divisors(ranks)
                    .filter(|expert| experts.is_multiple_of(*expert))
                    .map(|expert| [expert, expert_tensor]),
            );
        }
        degrees
    }

    fn zero_stages(&self, degrees: &Degrees) -> &'static [ZeroStage] {
        const SHARED: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
        const CONTEXT: [ZeroStage; 4] =
            [ZeroStage::Nothing, ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];
        let stages: &[ZeroStage] =
            match (self.facts.step.updates_whole_matrices, degrees.shard, degrees.context) {
                (true, ..) | (false, 1, 1) => &[ZeroStage::Nothing],
                // Context-parallel ranks shard the state as well.
                (false, 1, _) => &CONTEXT,
                _ => &SHARED,
            };
        // Quantized weights are replicated.
        match stages {
            [stages @ .., ZeroStage::Parameters] if self.facts.has_quantized_weights => stages,
            stages => stages,
        }
    }

    fn micro_batches(&self, degrees: &Degrees) -> impl Iterator<Item = usize> + use<> {
        let batch = self.facts.step.global_batch / (degrees.replicate * degrees.shard);
        let given = self.micro_batch;
        let is_tried = move |size: &usize| match given {
            Some(given) => *size == given,
            None => {
                let is_round = size.is_power_of_two() || *size == batch || *size <= 6;
                is_round && *size <= LARGEST_MICRO_BATCH
            }
        };
        divisors(batch).filter(is_tried)
    }

    fn sequence_parallel(&self, degrees: &Degrees) -> Vec<bool> {
        let can_split =
            degrees.tensor > 1 && self.facts.step.seq_len.is_multiple_of(degrees.context * degrees.tensor);
        match (can_split, self.tries_whole_tokens) {
            (true, true) => vec![true, false],
            (can_split, _) => vec![can_split],
        }
    }

    /// Returns the context-parallel algorithms to try; all-to-all needs a multiple of the ranks as heads.
    fn methods(&self, degrees: &Degrees) -> impl Iterator<Item = ContextMethod> + use<'_> {
        let ranks = degrees.context * degrees.tensor;
        let can_share_heads = self.facts.heads.is_multiple_of(ranks);
        let fits = move |method: &ContextMethod| *method != ContextMethod::AllToAll || can_share_heads;
        let number = if degrees.context == 1 { 1 } else { self.context_methods.len() };
        let methods = self.context_methods.iter().copied().take(number);
        methods.filter(move |method| number == 1 || fits(method))
    }

    fn schedules(&self, degrees: &Degrees, micro_batch: usize) -> Vec<(Kind, usize)> {
        let parts = degrees.replicate * degrees.shard;
        let (ranks, micro_batches) = (degrees.pipeline, self.facts.step.global_batch / parts / micro_batch);
        if ranks == 1 {
            return vec![(Kind::OneForwardOneBackward, 1)];
        }
        // GPipe takes the time of 1F1B and more memory.
        let kinds = Kind::ALL.into_iter().filter(|kind| *kind != Kind::GPipe);
        let chunks = |kind: Kind| {
            let (fewest, most) = kind.chunks();
            (fewest..=most.min(MOST_CHUNKS)).map(move |chunks| (kind, chunks))
        };
        // Looped breadth-first with one chunk is GPipe.
        let is_gpipe = |(kind, chunks): &(Kind, usize)| *kind == Kind::LoopedBreadthFirst && *chunks == 1;
        let fits = |(kind, chunks): &(Kind, usize)| {
            ranks * chunks <= self.facts.units && kind.problems(ranks, micro_batches, *chunks).is_empty()
        };
        kinds.flat_map(chunks).filter(|schedule| !is_gpipe(schedule) && fits(schedule)).collect()
    }
}

fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |divisor| number.is_multiple_of(*divisor))
}
