//! Nearest valid numbers, for messages about invalid ones.

use std::fmt;

/// Nearest valid choices to a number: the largest below and the smallest above. Both are `None` only if there is no valid choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choices {
    /// Largest valid choice below.
    pub below: Option<usize>,
    /// Smallest valid choice above.
    pub above: Option<usize>,
}

impl Choices {
    /// Creates choices with a single valid one.
    pub(crate) const fn only(choice: usize) -> Self {
        Self { below: Some(choice), above: None }
    }
}

impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.below, self.above) {
            (Some(below), Some(above)) => write!(f, "nearest: {below} or {above}"),
            (Some(only), None) | (None, Some(only)) => write!(f, "nearest: {only}"),
            (None, None) => f.write_str("no number would do"),
        }
    }
}

/// Returns the divisors of `of` in no particular order, in time proportional to its root; that of a square occurs twice.
pub(crate) fn divisors(of: usize) -> impl Iterator<Item = usize> {
    let small = (1..=of.isqrt()).filter(move |&candidate| of.is_multiple_of(candidate));
    small.flat_map(move |divisor| [divisor, of / divisor])
}

/// Returns the divisors of `of` nearest to `number`.
pub(crate) fn nearest_divisor(number: usize, of: usize) -> Choices {
    next_to(number, divisors(of))
}

/// Returns the candidates nearest to `number`.
pub(crate) fn next_to(number: usize, candidates: impl Iterator<Item = usize>) -> Choices {
    candidates.fold(Choices { below: None, above: None }, |nearest, candidate| Choices {
        below: nearest.below.max(Some(candidate).filter(|&candidate| candidate < number)),
        above: [nearest.above, Some(candidate)].into_iter().flatten().filter(|&choice| choice > number).min(),
    })
}

/// Returns the positive multiples of `of` nearest to `number`.
pub(crate) fn nearest_multiple(number: usize, of: usize) -> Choices {
    let below = number / of * of;
    Choices { below: (below > 0).then_some(below), above: (number / of + 1).checked_mul(of) }
}

/// Formats problems, one per line.
pub(crate) fn lines<T: fmt::Display>(problems: &[T]) -> String {
    problems.iter().map(T::to_string).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_multiples_lie_on_both_sides() {
        assert_eq!(nearest_multiple(10, 4), Choices { below: Some(8), above: Some(12) });
        assert_eq!(nearest_multiple(3, 4), Choices { below: None, above: Some(4) });
    }

    #[test]
    fn the_nearest_divisors_lie_on_both_sides() {
        assert_eq!(nearest_divisor(5, 12), Choices { below: Some(4), above: Some(6) });
        assert_eq!(nearest_divisor(13, 12), Choices { below: Some(12), above: None });
        assert_eq!(nearest_divisor(2, 7), Choices { below: Some(1), above: Some(7) });
    }
}
