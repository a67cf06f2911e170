//! Clipping of gradients by their global norm, as in `torch.nn.utils.clip_grad_norm_`.
//!
//! The coefficient is a factor of the optimizer step, so that no pass over the gradients is needed.

/// Returns the gradient scale of clipping: `min(1, max_norm / (norm + 1e-6))`, or 1 if `max_norm` is 0 (off).
pub fn clip_coefficient(max_norm: f64, norm: f64) -> f64 {
    if max_norm == 0.0 { 1.0 } else { (max_norm / (norm + 1e-6)).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clip_coefficient_is_that_of_pytorch_at_its_boundaries() {
        for (max_norm, norm, expected) in [
            (1.0, 2.0, 1.0 / 2.000_001),
            // At the limit itself the epsilon makes the difference.
            (1.0, 1.0, 1.0 / 1.000_001),
            (1.0, 1.0 - 1e-6, 1.0),
            (1e-6, 1e-6, 0.5),
            (1.0, 0.0, 1.0),
            (0.0, 5.0, 1.0),
        ] {
            let found = clip_coefficient(max_norm, norm);
            assert!(
                (found - expected).abs() < 1e-12,
                "{found} of {max_norm} and {norm}, {expected} expected"
            );
        }
    }
}
