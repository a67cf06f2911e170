//! Comparison of a plan's numbers with those of one rank: the differences, their limits and the verdict.
//!
//! A plan in f32 is compared with one rank directly. In narrower types two correct programs differ by the rounding of both, so
//! both are compared with one rank in f32. The plan's gradients as a whole may be [`NARROW_FACTOR`] times as far from it as those
//! of one rank in the narrow type. Single parameters may be somewhat further because the norm of few errors varies.

use serde::Serialize;

use crate::verify::{Numbers, Tolerance};

/// Allowed distance of a plan in bf16 or f16 from one rank in f32, relative to the distance of one rank in that type.
pub const NARROW_FACTOR: f64 = 1.5;
/// Least distance of one rank that is assumed: half a unit in the last place of bf16, one rounding of a loss.
const ROUNDING: f64 = 1.0 / 512.0;

/// Router margin below which rounding may send a token to other experts.
pub const ROUTER_MARGIN: f32 = 1e-3;

/// Name of the entry for the whole model.
const ALL_PARAMETERS: &str = "all parameters";

/// Standard deviations granted to a single parameter. The norm of n rounding errors has a relative deviation of 1/sqrt(2 n), and
/// the ratio of two such norms one of 1/sqrt(n).
const DEVIATIONS: f64 = 4.0;

/// A number of a step, compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedStep {
    /// Step number, from 1.
    pub step: usize,
    /// `loss` or `gradient norm`.
    pub what: &'static str,
    /// Value of the plan.
    pub plan: f64,
    /// Value of one rank.
    pub one_rank: f64,
    /// Value of one rank in f32, if both others are narrower.
    pub f32: Option<f64>,
    /// Relative difference of the plan's value from that of one rank, in f32 if present.
    pub difference: f64,
    /// Allowed difference; `None` if the value is shown and not judged.
    pub allowed: Option<f64>,
}

/// The gradient of a parameter in the first step, compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedGradient {
    /// Name of the parameter.
    pub name: String,
    /// L2 norm of one rank's gradient, in f32.
    pub norm: f64,
    /// L2 norm of the difference between the plan's gradient and one rank's.
    pub difference: f64,
    /// Allowed norm of the difference.
    pub allowed: f64,
    /// Element with the largest difference; `None` for the whole model, or for a parameter whose shapes differ.
    pub worst: Option<ComparedElement>,
}

/// One element of a gradient, compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ComparedElement {
    /// Index in the parameter.
    pub index: usize,
    /// Value of the plan.
    pub plan: f32,
    /// Value of one rank.
    pub one_rank: f32,
}

/// Comparison of a plan's numbers with one rank's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Loss and gradient norm of each step.
    pub steps: Vec<ComparedStep>,
    /// Gradients of the first step, ordered by difference relative to its limit, the largest first.
    pub gradients: Vec<ComparedGradient>,
    /// Smallest router margin of any token on one rank, in models with experts: see [`ROUTER_MARGIN`].
    pub router_margin: Option<f32>,
    /// Descriptions of the differences that exceed their limits.
    pub failures: Vec<String>,
}

impl Comparison {
    /// Compares a plan in f32 with one rank.
    pub fn of_f32(plan: &Numbers, one_rank: &Numbers, tolerance: Tolerance) -> Self {
        let compared = |index: usize, what, [plan, one_rank]: [f64; 2]| {
            // The gradient norm of later steps deviates more than the loss: it is shown and not judged.
            let later = (what == "loss").then_some(tolerance.later);
            let allowed = if index == 0 { Some(tolerance.first) } else { later };
            let difference = (plan - one_rank).abs() / one_rank.abs();
            ComparedStep { step: index + 1, what, plan, one_rank, f32: None, difference, allowed }
        };
        let steps = steps(plan, one_rank, compared);
        let of_model = norm_of_model(one_rank);
        let gradients =
            gradients(plan, one_rank, |_, own| tolerance.gradient * own + tolerance.model * of_model);
        let mut failures = failures(&steps, &gradients);
        let (made, expected) = (plan.steps.len(), one_rank.steps.len());
        if made != expected {
            failures.push(format!("{made} steps were made, on one rank {expected}"));
        }
        let is_decided = one_rank.router_margin.is_some_and(|margin| margin > ROUTER_MARGIN);
        for (index, loads) in plan.load.iter().zip(&one_rank.load).enumerate() {
            // Expert loads of later steps are compared only if rounding cannot have changed any token's choice.
            if index == 0 || is_decided {
                failures.extend(other_experts(index + 1, loads));
            }
        }
        Self { steps, gradients, router_margin: one_rank.router_margin, failures }.sorted()
    }

    /// Compares a plan in a narrower type and one rank in that type, both with one rank in f32.
    pub fn of_narrow(plan: &Numbers, one_rank: &Numbers, exact: &Numbers) -> Self {
        let compared = |index: usize, what, [plan, one_rank]: [f64; 2]| {
            let at = usize::from(what != "loss");
            let exact = exact.steps.get(index).map_or(f64::NAN, |step| step[at]);
            let off = |number: f64| (number - exact).abs() / exact.abs();
            let allowed = (index == 0).then(|| NARROW_FACTOR * off(one_rank).max(ROUNDING));
            let f32 = Some(exact);
            ComparedStep { step: index + 1, what, plan, one_rank, f32, difference: off(plan), allowed }
        };
        let steps = steps(plan, one_rank, compared);
        let of_model = norm_of_model(exact);
        // Error of one rank: of this parameter, or of the whole model relative to its norm, because small gradients may be exact
        // by luck.
        let relative = error_of_model(one_rank, exact) / of_model;
        let error = |name: &str| distance(one_rank.gradients.get(name), exact.gradients.get(name));
        let gradients = gradients(plan, exact, |name, own| {
            let elements = exact.gradients.get(name).map_or(1, Vec::len).max(1) as f64;
            NARROW_FACTOR * (1.0 + DEVIATIONS / elements.sqrt()) * error(name).max(relative * own)
        });
        let whole = ComparedGradient {
            name: ALL_PARAMETERS.to_owned(),
            norm: of_model,
            difference: error_of_model(plan, exact),
            allowed: NARROW_FACTOR * relative * of_model,
            worst: None,
        };
        let failures = failures(&steps, gradients.iter().chain([&whole]));
        let router_margin = one_rank.router_margin;
        let mut comparison = Self { steps, gradients, router_margin, failures }.sorted();
        comparison.gradients.insert(0, whole);
        comparison
    }

    /// Returns true if every difference is within its limit.
    pub fn is_within(&self) -> bool {
        self.failures.is_empty()
    }

    /// Number of parameters whose gradients are compared.
    pub fn parameters(&self) -> usize {
        self.gradients.iter().filter(|gradient| gradient.name != ALL_PARAMETERS).count()
    }

    fn sorted(mut self) -> Self {
        self.gradients.sort_by(|a, b| b.share().total_cmp(&a.share()));
        self
    }
}

impl ComparedStep {
    fn is_within(&self) -> bool {
        self.allowed.is_none_or(|allowed| self.difference <= allowed)
    }

    fn failure(&self) -> String {
        let Self { step, what, plan, one_rank, f32, .. } = self;
        let exact = f32.map_or(String::new(), |exact| format!(", in f32 {exact}"));
        format!("step {step}: {what} {plan}, on one rank {one_rank}{exact}")
    }
}

impl ComparedGradient {
    /// Difference divided by its limit.
    pub fn share(&self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { self.difference / self.allowed }
    }

    fn is_outside(&self) -> bool {
        self.difference.is_nan() || self.difference > self.allowed
    }

    fn failure(&self) -> String {
        let Self { name, difference, allowed, worst, .. } = self;
        let element = worst.map_or(String::new(), |ComparedElement { index, plan, one_rank }| {
            format!("; element {index} is {plan:e}, on one rank {one_rank:e}")
        });
        format!("gradient of {name}: differs by {difference:.3e}, allowed is {allowed:.3e}{element}")
    }
}

/// Describes the differences that exceed their limits.
fn failures<'a>(
    steps: &[ComparedStep],
    gradients: impl IntoIterator<Item = &'a ComparedGradient>,
) -> Vec<String> {
    let steps = steps.iter().filter(|step| !step.is_within()).map(ComparedStep::failure);
    let gradients = gradients.into_iter().filter(|gradient| gradient.is_outside());
    steps.chain(gradients.map(ComparedGradient::failure)).collect()
}

/// Describes the layers whose expert load differs.
fn other_experts(step: usize, (plan, one_rank): (&Vec<Vec<i64>>, &Vec<Vec<i64>>)) -> Vec<String> {
    let layers = plan.iter().zip(one_rank).enumerate().filter(|(_, (plan, one_rank))| plan != one_rank);
    let tell = |(layer, (plan, one_rank)): (usize, (&Vec<i64>, &Vec<i64>))| {
        format!(
            "step {step}: layer {layer} of those with experts: they were chosen {plan:?} times, on one rank {one_rank:?}"
        )
    };
    layers.map(tell).collect()
}

fn steps(
    plan: &Numbers,
    one_rank: &Numbers,
    compared: impl Fn(usize, &'static str, [f64; 2]) -> ComparedStep,
) -> Vec<ComparedStep> {
    let mut steps = Vec::new();
    for (index, (plan, one_rank)) in plan.steps.iter().zip(&one_rank.steps).enumerate() {
        for (at, what) in ["loss", "gradient norm"].into_iter().enumerate() {
            steps.push(compared(index, what, [plan[at], one_rank[at]]));
        }
    }
    steps
}

fn gradients(plan: &Numbers, measure: &Numbers, allowed: impl Fn(&str, f64) -> f64) -> Vec<ComparedGradient> {
    let of_plan_alone = plan.gradients.keys().filter(|name| !measure.gradients.contains_key(*name));
    let compared = |name: &String| {
        let (found, expected) = (plan.gradients.get(name), measure.gradients.get(name));
        let own = norm(expected.into_iter().flatten().map(|g| f64::from(*g)));
        ComparedGradient {
            name: name.clone(),
            norm: own,
            difference: distance(found, expected),
            allowed: allowed(name, own),
            worst: worst(found, expected),
        }
    };
    measure.gradients.keys().chain(of_plan_alone).map(compared).collect()
}

/// Returns the element with the largest difference.
fn worst(plan: Option<&Vec<f32>>, one_rank: Option<&Vec<f32>>) -> Option<ComparedElement> {
    let pairs = plan?.iter().zip(one_rank?).enumerate();
    let apart = |(_, (plan, one_rank)): &(usize, (&f32, &f32))| (**plan - **one_rank).abs();
    let (index, (plan, one_rank)) = pairs.max_by(|a, b| apart(a).total_cmp(&apart(b)))?;
    Some(ComparedElement { index, plan: *plan, one_rank: *one_rank })
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

/// Returns the norm of the difference; NaN if the parameter is missing or has another shape.
fn distance(a: Option<&Vec<f32>>, b: Option<&Vec<f32>>) -> f64 {
    match (a, b) {
        (Some(a), Some(b)) if a.len() == b.len() => {
            norm(a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)))
        }
        _ => f64::NAN,
    }
}

fn norm_of_model(numbers: &Numbers) -> f64 {
    norm(numbers.gradients.values().flatten().map(|g| f64::from(*g)))
}

fn error_of_model(numbers: &Numbers, exact: &Numbers) -> f64 {
    norm(exact.gradients.iter().map(|(name, gradient)| distance(numbers.gradients.get(name), Some(gradient))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(loss: f64, gradient: [f32; 2]) -> Numbers {
        let gradients = [("w".to_owned(), gradient.to_vec())].into();
        Numbers {
            steps: vec![[loss, 1.0]],
            gradients,
            load: vec![vec![vec![3, 1]]; 2],
            router_margin: Some(0.25),
        }
    }

    #[test]
    fn f32_plans_are_held_against_one_rank() {
        let one_rank = numbers(2.0, [3.0, 4.0]);
        let near = Comparison::of_f32(&numbers(2.000_001, [3.0, 4.000_01]), &one_rank, Tolerance::F32);
        assert!(near.is_within(), "{near:?}");
        let far = Comparison::of_f32(&numbers(2.1, [3.0, 4.1]), &one_rank, Tolerance::F32);
        assert_eq!(far.failures.len(), 2, "{far:?}");
        let elsewhere = Numbers { load: vec![vec![vec![2, 2]]; 2], ..one_rank.clone() };
        assert_eq!(Comparison::of_f32(&elsewhere, &one_rank, Tolerance::F32).failures.len(), 2);
        let undecided = Numbers { router_margin: Some(1e-6), ..one_rank };
        assert_eq!(Comparison::of_f32(&elsewhere, &undecided, Tolerance::F32).failures.len(), 1);
    }

    #[test]
    fn narrow_plans_may_lose_half_as_much_again_as_one_rank() {
        let (exact, one_rank) = (numbers(2.0, [3.0, 4.0]), numbers(2.02, [3.0, 4.1]));
        let near = Comparison::of_narrow(&numbers(1.98, [3.0, 3.86]), &one_rank, &exact);
        assert!(near.is_within(), "{near:?}");
        let far = Comparison::of_narrow(&numbers(1.96, [3.0, 3.84]), &one_rank, &exact);
        let words = ["step 1: loss 1.96, on one rank 2.02, in f32 2", "gradient of all parameters"];
        assert_eq!(far.failures.len(), words.len(), "{far:?}");
        for (failure, words) in far.failures.iter().zip(words) {
            assert!(failure.starts_with(words), "{far:?}");
        }
    }

    #[test]
    fn gradients_of_other_sizes_or_that_are_no_numbers_are_never_near() {
        let (exact, one_rank) = (numbers(2.0, [3.0, 4.0]), numbers(2.0, [3.0, 4.1]));
        let broken = numbers(f64::NAN, [f32::NAN, 4.0]);
        assert_eq!(Comparison::of_narrow(&broken, &one_rank, &exact).failures.len(), 3);
        assert_eq!(Comparison::of_narrow(&Numbers::default(), &one_rank, &exact).failures.len(), 2);
        assert_eq!(Comparison::of_f32(&broken, &exact, Tolerance::F32).failures.len(), 2);
    }
}
