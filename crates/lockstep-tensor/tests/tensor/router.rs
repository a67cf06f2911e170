//! Routers against the definition: chosen experts, weights, and the gradient of the logits.

use lockstep_plan::DType;
use lockstep_tensor::{
    Arena, CpuQueue, ExpertGroups, Router, RouterGradients, RouterKernels, RouterOutputs, RouterScores,
    RouterWeights, Tensor, TokenPositions,
};

use crate::reference::{self, finite_differences};
use crate::testing::{
    ACTIVATIONS, assert_close, floats, on_every_queue, random_of, tensor, tolerance, values,
};

/// A router without views, and logits for it.
#[derive(Debug, Clone)]
struct Case {
    shape: (usize, usize),
    top_k: usize,
    scores: RouterScores,
    weights: RouterWeights,
    groups: Option<ExpertGroups>,
    bias: Option<Vec<f64>>,
    scale: f32,
}

impl Case {
    fn new(shape: (usize, usize), top_k: usize, scores: RouterScores, weights: RouterWeights) -> Self {
        Self { shape, top_k, scores, weights, groups: None, bias: None, scale: 1.0 }
    }

    fn deep_seek(tokens: usize) -> Self {
        let bias =
            random_of(DType::F32, 9, 32).iter().map(|x| 0.05 * x).map(|x| f64::from(x as f32)).collect();
        Self {
            groups: Some(ExpertGroups { count: 8, kept: 3 }),
            bias: Some(bias),
            scale: 2.5,
            ..Self::new((tokens, 32), 6, RouterScores::Sigmoid, RouterWeights::Normalized)
        }
    }

    fn all() -> Vec<Self> {
        let mut cases = vec![Self::deep_seek(40)];
        for scores in [RouterScores::Softmax, RouterScores::Sigmoid] {
            for weights in [RouterWeights::Scores, RouterWeights::Normalized] {
                for (shape, top_k) in [((1, 1), 1), ((7, 8), 2), ((33, 60), 4), ((300, 300), 8)] {
                    cases.push(Self::new(shape, top_k, scores, weights));
                }
            }
        }
        cases
    }

    fn router<'a>(&self, bias: Option<&'a Tensor>) -> Router<'a> {
        Router {
            top_k: self.top_k,
            scores: self.scores,
            selection_bias: bias.map(Tensor::view),
            groups: self.groups,
            weights: self.weights,
            scale: self.scale,
        }
    }

    fn bias(&self) -> Option<Tensor> {
        self.bias.as_ref().map(|bias| floats(DType::F32, [bias.len()], bias))
    }

    /// Returns weights and probabilities by the definition, given the choice.
    fn reference(&self, logits: &[f64], chosen: &[u32]) -> reference::Routing {
        reference::route(
            logits,
            self.shape.1,
            chosen,
            self.scores == RouterScores::Softmax,
            self.weights == RouterWeights::Normalized,
            f64::from(self.scale),
        )
    }
}

/// Tensors for the outputs of a router.
struct Results([Tensor; 4]);

impl Results {
    fn new((tokens, experts): (usize, usize), top_k: usize) -> Self {
        Self([
            floats(DType::F32, [tokens, experts], &vec![9.0; tokens * experts]),
            floats(DType::F32, [tokens], &vec![9.0; tokens]),
            tensor(&vec![77_u32; tokens * top_k]),
            floats(DType::F32, [tokens, top_k], &vec![9.0; tokens * top_k]),
        ])
    }

    fn routed(&self) -> RouterOutputs<'_> {
        let [scores, log_sum_exp, experts, weights] = self.0.each_ref().map(Tensor::view);
        let (tokens, top_k) = weights.shape().as_matrix();
        RouterOutputs { scores, log_sum_exp, experts: experts.reshape([tokens, top_k]), weights }
    }

    fn chosen(&self) -> Vec<u32> {
        self.routed().experts.to_vec()
    }
}

/// Returns the experts that a router of `scores + bias` must choose.
fn expected_choice(case: &Case, scores: &[f64]) -> Vec<u32> {
    let (_, experts) = case.shape;
    let by_value = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        // The sort is stable, so that the lower index wins a tie.
        order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
        order
    };
    let of_token = |scores: &[f64]| -> Vec<u32> {
        let bias = |expert: usize| case.bias.as_ref().map_or(0.0, |bias| bias[expert]);
        let mut values: Vec<f64> = scores.iter().enumerate().map(|(i, s)| s + bias(i)).collect();
        if let Some(groups) = case.groups {
            let size = experts / groups.count;
            let best_two = |group: &[f64]| by_value(group).iter().take(2).map(|i| group[*i]).sum::<f64>();
            let sums: Vec<f64> = values.chunks(size).map(best_two).collect();
            for group in &by_value(&sums)[groups.kept..] {
                values[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
            }
        }
        by_value(&values)[..case.top_k].iter().map(|expert| *expert as u32).collect()
    };
    scores.chunks(experts).flat_map(of_token).collect()
}

#[test]
fn routers_choose_and_weigh_as_defined() {
    for (case, dtype) in Case::all().iter().flat_map(|case| ACTIVATIONS.map(|dtype| (case, dtype))) {
        let (tokens, experts) = case.shape;
        let logits = random_of(dtype, 4, tokens * experts);
        let run = |queue: &CpuQueue| {
            let (results, bias) = (Results::new(case.shape, case.top_k), case.bias());
            let logits = floats(dtype, [tokens, experts], &logits);
            queue.router_top_k(&case.router(bias.as_ref()), logits.view(), results.routed());
            let chosen = results.chosen().into_iter().map(f64::from).collect();
            let [scores, log_sum_exp, _, weights] = results.0;
            vec![values(scores.view()), values(log_sum_exp.view()), chosen, values(weights.view())]
        };
        on_every_queue(run, |results| {
            // Experts are compared by the kernel's own scores: these may tie where f64 scores do not.
            let chosen = expected_choice(case, &results[0]);
            assert_eq!(results[2], chosen.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), "{case:?}");
            let expected = case.reference(&logits, &chosen);
            assert_close("scores", &results[0], &expected.scores, 1e-6, 1e-9);
            assert_close("log-sum-exps", &results[1], &expected.log_sum_exp, 1e-6, 1e-6);
            assert_close("weights", &results[3], &expected.weights, 2e-6, 1e-9);
        });
    }
}

#[test]
fn of_equal_experts_the_first_are_chosen() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let choose = |groups, top_k, logits: [f64; 8]| {
        let case = Case::new((1, 8), top_k, RouterScores::Softmax, RouterWeights::Scores);
        let results = Results::new((1, 8), top_k);
        let router = Router { groups, ..case.router(None) };
        queue.router_top_k(&router, floats(DType::F32, [1, 8], &logits).view(), results.routed());
        results.chosen()
    };
    assert_eq!(choose(None, 3, [1.0; 8]), [0, 1, 2]);
    assert_eq!(choose(None, 3, [0.0, 2.0, 1.0, 2.0, 1.0, 0.0, 1.0, 0.0]), [1, 3, 2]);
    let groups = |kept| Some(ExpertGroups { count: 4, kept });
    assert_eq!(choose(groups(2), 3, [1.0; 8]), [0, 1, 2]);
    // The best expert is in a group that is not selected.
    assert_eq!(choose(groups(1), 2, [2.5, -9.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]), [2, 3]);
}

#[test]
fn the_bias_changes_the_choice_and_not_the_weights() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let case = Case::new((1, 4), 2, RouterScores::Sigmoid, RouterWeights::Scores);
    let bias = floats(DType::F32, [4], &[0.0, 0.0, 0.0, 5.0]);
    let results = Results::new((1, 4), 2);
    let logits = floats(DType::F32, [1, 4], &[2.0, 1.0, 0.0, -1.0]);
    queue.router_top_k(&case.router(Some(&bias)), logits.view(), results.routed());
    assert_eq!(results.chosen(), [3, 0]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    assert_close("weights", &values(results.0[3].view()), &[sigmoid(-1.0), sigmoid(2.0)], 1e-6, 0.0);
}

#[test]
fn a_nan_logit_spoils_the_weights_of_its_token_and_no_other() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let case = Case::new((2, 4), 2, RouterScores::Softmax, RouterWeights::Normalized);
    let results = Results::new((2, 4), 2);
    let logits = floats(DType::F32, [2, 4], &[0.0, f64::NAN, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0]);
    queue.router_top_k(&case.router(None), logits.view(), results.routed());
    let weights = values(results.0[3].view());
    assert!(
        weights[..2].iter().all(|x| x.is_nan()) && weights[2..].iter().all(|x| x.is_finite()),
        "{weights:?}"
    );
    assert_eq!(results.chosen()[2..], [3, 2]);
}

#[test]
fn the_margin_is_the_least_by_which_a_token_prefers_its_last_expert_or_group() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let margin = |case: &Case, scores: &[f64]| {
        let bias = case.bias();
        let scores = floats(DType::F32, [case.shape.0, case.shape.1], scores);
        queue.router_margin(&case.router(bias.as_ref()), scores.view()).wait()
    };
    let case = Case::new((2, 4), 2, RouterScores::Softmax, RouterWeights::Scores);
    assert_eq!(margin(&case, &[0.5, 0.25, 0.0, 0.125, 0.0, 0.25, 0.5, 1.0]), 0.125);
    assert_eq!(
        margin(&Case { top_k: 4, ..case.clone() }, &[0.0; 8]),
        f32::INFINITY,
        "there is no other choice"
    );
    let biased = Case { bias: Some(vec![0.0, 0.0, 0.0625, 0.0]), ..case };
    assert_eq!(margin(&biased, &[0.5, 0.25, 0.0, 0.125, 0.0, 0.25, 0.5, 1.0]), 0.125);
    assert_eq!(margin(&biased, &[0.5, 0.25, 0.125, 0.0, 0.0, 0.25, 0.5, 1.0]), 0.0625);
    // The margin of the groups is smaller than that of the experts of the selected group.
    let grouped = Case { shape: (1, 4), top_k: 1, groups: Some(ExpertGroups { count: 2, kept: 1 }), ..case };
    assert_eq!(margin(&grouped, &[0.5, 0.25, 0.375, 0.3125]), 0.0625);
}

/// Some rows of three sequences.
fn places(tokens: usize) -> TokenPositions {
    TokenPositions { first_row: 1, ..TokenPositions::whole((tokens + 1).div_ceil(3)) }
}

/// The loss whose gradients are tested below, with a fixed choice.
fn loss(case: &Case, logits: &[f64], chosen: &[u32], [dweights, dprobabilities]: [&[f64]; 2], z: f64) -> f64 {
    let (tokens, experts) = case.shape;
    let routing = case.reference(logits, chosen);
    let by_weights: f64 = routing.weights.iter().zip(dweights).map(|(w, dw)| w * dw).sum();
    let by_probabilities: f64 = routing
        .probabilities
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let (sequence, _) = places(tokens).of(i / experts);
            p * dprobabilities[sequence * experts + i % experts]
        })
        .sum();
    by_weights + by_probabilities + z * routing.log_sum_exp.iter().map(|x| x * x).sum::<f64>()
}

#[test]
fn the_gradient_of_the_logits_matches_finite_differences() {
    for case in
        [Case::deep_seek(5)].into_iter().chain(Case::all().into_iter().filter(|case| case.shape.0 < 30))
    {
        let (tokens, experts) = case.shape;
        for (dtype, z) in ACTIVATIONS.into_iter().flat_map(|dtype| [0.0_f32, 0.25].map(|z| (dtype, z))) {
            let logits = random_of(dtype, 4, tokens * experts);
            let dweights = random_of(DType::F32, 5, tokens * case.top_k);
            let dprobabilities = random_of(DType::F32, 6, 3 * experts);
            for is_balanced in [false, true] {
                let run = |queue: &CpuQueue| {
                    let (results, bias) = (Results::new(case.shape, case.top_k), case.bias());
                    let [x, dx] =
                        [&logits, &vec![9.0; tokens * experts]].map(|x| floats(dtype, [tokens, experts], x));
                    let router = case.router(bias.as_ref());
                    queue.router_top_k(&router, x.view(), results.routed());
                    let dweights = floats(DType::F32, [tokens, case.top_k], &dweights);
                    let dprobabilities = floats(DType::F32, [3, experts], &dprobabilities);
                    let gradients = RouterGradients {
                        weights: dweights.view(),
                        probabilities: is_balanced.then(|| dprobabilities.view()),
                        squared_log_sum_exp: z,
                    };
                    let places = places(tokens);
                    queue.router_top_k_backward(
                        &router,
                        x.view(),
                        results.routed(),
                        gradients,
                        places,
                        dx.view(),
                    );
                    vec![values(dx.view()), results.chosen().into_iter().map(f64::from).collect()]
                };
                let none = vec![0.0; 3 * experts];
                let balance = if is_balanced { &dprobabilities } else { &none };
                on_every_queue(run, |results| {
                    let chosen: Vec<u32> = results[1].iter().map(|x| *x as u32).collect();
                    let expected = finite_differences(&logits, |x| {
                        loss(&case, x, &chosen, [&dweights, balance], f64::from(z))
                    });
                    assert_close("dlogits", &results[0], &expected, tolerance(dtype) + 1e-5, 3e-6);
                });
            }
        }
    }
}

#[test]
fn the_load_counts_choices_and_adds_probabilities_of_each_sequence() {
    for case in [Case::deep_seek(40), Case::new((300, 300), 8, RouterScores::Softmax, RouterWeights::Scores)]
    {
        let (tokens, experts) = case.shape;
        let logits = random_of(DType::F32, 4, tokens * experts);
        let run = |queue: &CpuQueue| {
            let (results, bias) = (Results::new(case.shape, case.top_k), case.bias());
            let logits = floats(DType::F32, [tokens, experts], &logits);
            queue.router_top_k(&case.router(bias.as_ref()), logits.view(), results.routed());
            let [counts, sums] = [(); 2].map(|()| floats(DType::F32, [3, experts], &vec![9.0; 3 * experts]));
            queue.router_load(results.routed(), places(tokens), counts.view(), sums.view());
            let chosen = results.chosen().into_iter().map(f64::from).collect();
            vec![values(counts.view()), values(sums.view()), chosen]
        };
        on_every_queue(run, |results| {
            let chosen: Vec<u32> = results[2].iter().map(|x| *x as u32).collect();
            let routing = case.reference(&logits, &chosen);
            let [mut counts, mut sums] = [(); 2].map(|()| vec![0.0; 3 * experts]);
            for token in 0..tokens {
                let (sequence, _) = places(tokens).of(token);
                for expert in &chosen[token * case.top_k..][..case.top_k] {
                    counts[sequence * experts + *expert as usize] += 1.0;
                }
                for expert in 0..experts {
                    sums[sequence * experts + expert] += routing.probabilities[token * experts + expert];
                }
            }
            assert_eq!(results[0], counts);
            assert_close("probabilities", &results[1], &sums, 1e-5, 1e-6);
        });
    }
}

#[test]
#[should_panic(expected = "a token cannot choose 3 of 8 experts in 1 of 4 groups")]
fn groups_with_too_few_experts_are_refused() {
    let queue = CpuQueue::new(1, &Arena::new()).unwrap();
    let case = Case::new((1, 8), 3, RouterScores::Softmax, RouterWeights::Scores);
    let router = Router { groups: Some(ExpertGroups { count: 4, kept: 1 }), ..case.router(None) };
    let results = Results::new((1, 8), 3);
    queue.router_top_k(&router, floats(DType::F32, [1, 8], &[0.0; 8]).view(), results.routed());
}
