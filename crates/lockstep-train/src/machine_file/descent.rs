//! Coordinate descent for a function of a few positive numbers: each is tried larger and smaller.

/// Step factors, from coarse to fine.
const FACTORS: [f64; 4] = [2.0, 1.3, 1.08, 1.02];
/// Most rounds with each factor; fits of a handful of numbers converge earlier.
const ROUNDS: usize = 60;

/// Changes `numbers`, each within its bounds, until no step reduces `error`.
pub(super) fn descend<const N: usize>(
    numbers: &mut [f64; N],
    bounds: [(f64, f64); N],
    error: impl Fn(&[f64; N]) -> f64,
) {
    let mut least = error(numbers);
    for factor in FACTORS {
        for _ in 0..ROUNDS {
            let before = least;
            for index in 0..N {
                for step in [factor, 1.0 / factor] {
                    let (low, high) = bounds[index];
                    let mut tried = *numbers;
                    tried[index] = (tried[index] * step).clamp(low, high);
                    let found = error(&tried);
                    if found < least {
                        (*numbers, least) = (tried, found);
                    }
                }
            }
            if least >= before {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bowl_is_descended_to_its_ground_and_bounds_hold() {
        let mut numbers = [1.0, 1.0, 1.0];
        let ground = [40.0_f64, 0.03, 7.0];
        let error = |found: &[f64; 3]| -> f64 {
            found.iter().zip(ground).map(|(found, ground)| (found / ground).ln().powi(2)).sum()
        };
        descend(&mut numbers, [(1e-3, 1e3), (1e-3, 1e3), (1e-3, 5.0)], error);
        for (found, expected) in numbers.into_iter().zip([40.0, 0.03, 5.0]) {
            assert!((found / expected - 1.0).abs() < 0.02, "{numbers:?}");
        }
    }
}
