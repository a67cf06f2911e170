//! Correction of the GEMM model by measured shapes. Cache effects are in no formula of three sides, but GEMMs of similar shapes deviate
//! from it by similar factors.

use std::collections::BTreeMap;

use lockstep_plan::DType;
use lockstep_plan::work::Product;

/// Distance of sides, in natural logarithms, at which shapes count as similar.
const ALIKE: f64 = 0.25;

/// Returns the name of a measured GEMM in a cluster file: its sides, "backward weights" if it is a weight gradient (accumulated in f32),
/// and its dtype unless f32.
pub fn product_name(is_of_weight: bool, [rows, inner, columns]: [usize; 3], dtype: DType) -> String {
    let of_weight = if is_of_weight { " backward weights" } else { "" };
    let of_type = if dtype == DType::F32 { String::new() } else { format!(" {dtype}") };
    format!("product{of_weight} {rows}x{inner}x{columns}{of_type}")
}

/// Parses such a name; `None` for other names and other dtypes.
fn product_of_name(name: &str, dtype: DType) -> Option<(bool, Product)> {
    let name = name.strip_prefix("product ")?;
    let (is_of_weight, name) = match name.strip_prefix("backward weights ") {
        Some(name) => (true, name),
        None => (false, name),
    };
    let (shape, of_type) = name.split_once(' ').unwrap_or((name, "f32"));
    if of_type != dtype.to_string() {
        return None;
    }
    let mut sides = shape.splitn(3, 'x').map(|side| side.parse::<u64>().ok().filter(|side| *side > 0));
    let [rows, inner, columns] = [sides.next()??, sides.next()??, sides.next()??];
    Some((is_of_weight, Product { rows, inner, columns, count: 1 }))
}

/// Deviations of measured GEMMs from the formula.
#[derive(Debug, Clone, Default)]
pub(super) struct Shapes(Vec<Shape>);

#[derive(Debug, Clone, Copy)]
struct Shape {
    is_of_weight: bool,
    logarithms: [f64; 3],
    /// Logarithm of the measured time over that of the formula.
    off: f64,
}

impl Shapes {
    /// Reads the GEMMs of a dtype from measured rates in 10⁹ operations per second. `formula` returns the seconds of a GEMM by whether it
    /// is a weight gradient.
    pub(super) fn new(
        measured: &BTreeMap<String, f64>,
        dtype: DType,
        formula: impl Fn(bool, &Product) -> f64,
    ) -> Self {
        let of_products =
            measured.range("product ".to_owned()..).take_while(|(name, _)| name.starts_with("product "));
        let shape = |(name, rate): (&String, &f64)| {
            let (is_of_weight, product) = product_of_name(name, dtype)?;
            let seconds = product.flops() as f64 / (rate * 1e9);
            let off = (seconds / formula(is_of_weight, &product)).ln();
            off.is_finite().then(|| Shape { is_of_weight, logarithms: logarithms(&product), off })
        };
        Self(of_products.filter_map(shape).collect())
    }

    /// Returns the factor by which a GEMM takes longer than by the formula: the mean of the measured ones, weighted by similarity.
    pub(super) fn factor(&self, is_of_weight: bool, product: &Product) -> f64 {
        let own = logarithms(product);
        let (mut sum, mut weights) = (0.0, 0.0);
        for shape in self.0.iter().filter(|shape| shape.is_of_weight == is_of_weight) {
            let distance: f64 =
                own.iter().zip(shape.logarithms).map(|(own, other)| (own - other).powi(2)).sum();
            let weight = (ALIKE * ALIKE + distance).powi(-2);
            sum += weight * shape.off;
            weights += weight;
        }
        if weights > 0.0 { (sum / weights).exp() } else { 1.0 }
    }
}

fn logarithms(product: &Product) -> [f64; 3] {
    [product.rows, product.inner, product.columns].map(|side| (side as f64).ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(sides: [usize; 3]) -> Product {
        let [rows, inner, columns] = sides.map(|side| side as u64);
        Product { rows, inner, columns, count: 1 }
    }

    #[test]
    fn names_say_what_was_measured() {
        for dtype in [DType::F32, DType::BF16] {
            for is_of_weight in [false, true] {
                let name = product_name(is_of_weight, [1024, 768, 3072], dtype);
                assert_eq!(product_of_name(&name, dtype), Some((is_of_weight, product([1024, 768, 3072]))));
                let other = if dtype == DType::F32 { DType::BF16 } else { DType::F32 };
                assert_eq!(product_of_name(&name, other), None, "{name}");
            }
        }
        for name in ["product", "product 3x4", "product 3x4x0", "product 3x4x5x6", "productions 3x4x5"] {
            assert_eq!(product_of_name(name, DType::F32), None, "{name}");
        }
    }

    #[test]
    fn what_was_measured_is_predicted_and_what_is_like_it_nearly_so() {
        // The formula says one second for everything.
        let rate = |sides: [usize; 3], seconds: f64| product(sides).flops() as f64 / 1e9 / seconds;
        let (small, large) = ([256, 256, 256], [1024, 768, 3072]);
        let measured = BTreeMap::from([
            (product_name(false, small, DType::F32), rate(small, 0.5)),
            (product_name(false, large, DType::F32), rate(large, 2.0)),
            ("attention forward".to_owned(), 1.0),
            ("update".to_owned(), 1.0),
        ]);
        let shapes = Shapes::new(&measured, DType::F32, |_, _| 1.0);
        let factor = |sides| shapes.factor(false, &product(sides));
        assert!((factor(small) - 0.5).abs() < 0.01, "{}", factor(small));
        assert!((factor(large) - 2.0).abs() < 0.01, "{}", factor(large));
        assert!((1.7..2.0).contains(&factor([1024, 768, 6000])), "{}", factor([1024, 768, 6000]));
        assert!((0.6..1.7).contains(&factor([512, 512, 900])), "{}", factor([512, 512, 900]));
        // These were not measured.
        assert_eq!(shapes.factor(true, &product(large)), 1.0);
        assert_eq!(Shapes::new(&measured, DType::BF16, |_, _| 1.0).factor(false, &product(large)), 1.0);
    }
}
