//! Work of small blocks under every kind of parallelism, checked against the profile and the roofline costs.

use lockstep_plan::{ContextMethod, ContextPlace, DType, ExpertPlace, TensorDimensions, TensorPlace};
use lockstep_tensor::{RouterScores, RouterWeights};

use super::*;
use crate::{
    AttentionOptions, AttentionShape, Bias, BlockShape, Linear, Mixture, Mode, Recompute, Recorder, Routing,
    Split, Transfer,
};

const WIDTH: usize = 16;
const SHAPE: BlockShape = BlockShape { sequences: 4, seq_len: 32, dtype: DType::BF16 };

/// Placement of a rank, and the end of its block.
#[derive(Debug, Clone, Copy, Default)]
struct Setting {
    tensor: TensorPlace,
    context: ContextPlace,
    experts: ExpertPlace,
    ends: Ends,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Ends {
    #[default]
    FeedForward,
    Experts,
    Loss,
}

const ROUTING: Routing = Routing {
    top_k: 2,
    scores: RouterScores::Softmax,
    weights: RouterWeights::Normalized,
    scale: 1.0,
    groups: None,
    auxiliary_loss: 0.01,
    z_loss: 0.0,
    capacity_factor: None,
};

fn record(setting: Setting, recompute: Recompute) -> Program {
    let mut g = Recorder::new(Mode::Training, SHAPE);
    let Setting { tensor, context, experts, ends } = setting;
    g.share_sequences(context);
    let splits = [
        ("q", Split::ColumnParallel { pieces: 4 }),
        ("k", Split::ColumnParallel { pieces: 2 }),
        ("v", Split::ColumnParallel { pieces: 2 }),
        ("o", Split::RowParallel),
        ("up", Split::ColumnParallel { pieces: 24 }),
        ("down", Split::RowParallel),
        ("head", Split::VocabularyParallel),
    ];
    g.split(tensor, splits.map(|(name, split)| (name.to_owned(), split)));
    g.share_experts(experts);
    let linear = |g: &mut Recorder, x, name, out_features| {
        let bias = if name == "head" { Bias::Without } else { Bias::With };
        g.linear(x, Linear { name, out_features, bias, std: 0.3 })
    };
    let x = g.input(WIDTH);
    let normed = g.rms_norm(x, "norm_1", WIDTH, 1e-5);
    let [q, k, v] =
        [("q", 32), ("k", 16), ("v", 16)].map(|(name, columns)| linear(&mut g, normed, name, columns));
    let shape = AttentionShape { scale: 0.4, ..AttentionShape::new(4, 2, 8) };
    let attended =
        g.attention(q, k, v, shape, AttentionOptions { dropout: 0.1, ..AttentionOptions::default() });
    let projected = linear(&mut g, attended, "o", WIDTH);
    let x = g.add(x, projected);
    let normed = g.layer_norm(x, "norm_2", Bias::With, 1e-5);
    let output = match ends {
        Ends::FeedForward => {
            let up = linear(&mut g, normed, "up", 24);
            let active = g.gelu(lockstep_tensor::Gelu::Tanh, up);
            let down = linear(&mut g, active, "down", WIDTH);
            g.add(x, down)
        }
        Ends::Experts => {
            let layers = ["e.gate", "e.up", "e.down"];
            let mixture = Mixture {
                router: "gate",
                selection_bias: None,
                layers,
                experts: 4,
                intermediate_size: 12,
                bias: Bias::Without,
                activation: lockstep_tensor::GatedActivation::Silu,
                routing: ROUTING,
                std: 0.3,
            };
            let fed = g.mixture(normed, &mixture);
            g.add(x, fed)
        }
        Ends::Loss => {
            let head = Linear { name: "head", out_features: 100, bias: Bias::Without, std: 0.3 };
            g.output_loss(normed, head, None)
        }
    };
    g.finish(output, recompute)
}

fn settings() -> Vec<Setting> {
    let tensor =
        |ranks, splits_tokens, chunks| TensorPlace { ranks, splits_tokens, chunks, ..TensorPlace::default() };
    let dimensions = TensorDimensions::Two;
    let square = TensorPlace { dimensions, ..tensor(4, true, 1) };
    let of_context = |method| ContextPlace { ranks: 2, rank: 0, method };
    let of_experts = |ranks, tensor_ranks| ExpertPlace { ranks, rank: 0, tensor_ranks, tensor_rank: 0 };
    let tensors = [
        TensorPlace::default(),
        tensor(2, false, 1),
        tensor(2, true, 1),
        tensor(2, false, 4),
        tensor(2, true, 4),
    ];
    let contexts = [ContextMethod::Ring, ContextMethod::AllGather, ContextMethod::AllToAll];
    let alone = Setting::default();
    let mut all = Vec::new();
    for ends in [Ends::FeedForward, Ends::Experts, Ends::Loss] {
        all.extend(tensors.map(|tensor| Setting { tensor, ends, ..alone }));
        all.extend(contexts.map(|method| Setting { context: of_context(method), ends, ..alone }));
    }
    let with_experts = Setting { ends: Ends::Experts, ..alone };
    all.push(Setting { experts: of_experts(2, 1), ..with_experts });
    all.push(Setting { experts: of_experts(2, 2), tensor: tensor(4, true, 1), ..with_experts });
    all.push(Setting { tensor: square, ..alone });
    all
}

fn flops(tasks: &[Task]) -> u64 {
    let of = |task: &Task| match task.kind {
        TaskKind::Product(product) => product.flops(),
        TaskKind::Attention(attention) => attention.flops,
        TaskKind::Stream | TaskKind::Exchange(_) => 0,
    };
    tasks.iter().filter(|task| task.pass != Pass::Recompute).map(of).sum()
}

#[test]
fn products_are_those_of_the_profile() {
    for setting in settings() {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let program = record(setting, recompute);
            let (profile, work) = (program.profile(), program.work());
            let backward = flops(&work.backward);
            let halves = flops(&work.backward_inputs) + flops(&work.backward_weights);
            let expected = profile.forward_flops + profile.backward_flops;
            let says = format!("{setting:?}, {recompute:?}");
            assert_eq!(flops(&work.forward) + backward, expected, "{says}");
            assert_eq!(halves, backward, "{says}, in two halves");
            if setting.ends != Ends::Loss {
                assert_eq!(backward, profile.backward_flops, "{says}");
            }
            assert_eq!(work.parameter_elements, profile.parameter_elements as u64, "{says}");
        }
    }
}

/// Returns true if the instruction only communicates.
fn only_sends(program: &Program, instruction: &Instruction) -> bool {
    let sends = |operation: usize, direction: usize| {
        let transfer = program.facts[operation].transfers.map(|transfers| transfers[direction]);
        matches!(transfer, Some(Transfer::AllGather | Transfer::AllReduce | Transfer::ReduceScatter))
    };
    match instruction {
        Instruction::Forward(operation) => sends(*operation, 0),
        Instruction::BackwardInputs { operation, .. } => sends(*operation, 1),
        Instruction::Await { .. } => true,
        _ => false,
    }
}

#[test]
fn bytes_and_vector_flops_are_those_of_the_roofline() {
    for setting in settings() {
        let program = record(setting, Recompute::Selective);
        let work = program.work();
        let is_left_out = |pass: Pass, instruction: &Instruction| match instruction {
            Instruction::Forward(operation) if pass == Pass::Forward => program.facts[*operation].is_loss,
            _ => only_sends(&program, instruction),
        };
        for (phase, tasks) in [
            (&program.forward, &work.forward),
            (&program.backward, &work.backward),
            (&program.backward_inputs, &work.backward_inputs),
            (&program.backward_weights, &work.backward_weights),
        ] {
            let mut expected = Cost::default();
            let mut parts = 0;
            for instruction in &phase.instructions {
                parts += u64::from(matches!(instruction, Instruction::Part { .. }));
                if !is_left_out(phase.pass, instruction) && !only_sends(&program, instruction) {
                    expected += program.cost(instruction, phase);
                }
            }
            let bytes: u64 = tasks.iter().map(|task| task.bytes).sum();
            let vector_flops: u64 = tasks.iter().map(|task| task.vector_flops).sum();
            // The cost of a part of a product is rounded down.
            assert!(bytes.abs_diff(expected.bytes) <= parts, "{setting:?}: {bytes}, {expected:?}");
            assert!(vector_flops.abs_diff(expected.vector_flops) <= parts, "{setting:?}");
        }
    }
}
