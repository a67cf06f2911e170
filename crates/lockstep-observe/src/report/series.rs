//! Downsampling of series: a hundred thousand steps become the few hundred points that a screen can show.
//!
//! Neighboring steps are grouped. A point is their mean, with their minimum and maximum if the chart shows bounds, so no spike is
//! lost.

use serde::Serialize;

/// A step and its value, if there is one.
pub(super) type Point = (u64, Option<f64>);

/// Maximum number of points of a line.
const MAX_POINTS: usize = 600;

/// A line of a chart, by columns.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct Series {
    /// Step of each point.
    x: Vec<u64>,
    /// Values; `None` where unknown.
    y: Vec<Option<f64>>,
    /// Minimum of the values of each point; empty if points stand for single values.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lo: Vec<Option<f64>>,
    /// Maximum of the values of each point; empty as `lo`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hi: Vec<Option<f64>>,
}

/// Returns a line of means.
pub(super) fn thinned(points: &[Point]) -> Series {
    Series { lo: Vec::new(), hi: Vec::new(), ..thinned_with_bounds(points) }
}

/// Returns a line of means with the bounds of the grouped values.
pub(super) fn thinned_with_bounds(points: &[Point]) -> Series {
    let together = points.len().div_ceil(MAX_POINTS).max(1);
    let mut series = Series::default();
    for chunk in points.chunks(together) {
        let values: Vec<f64> = finite(chunk).collect();
        let is_known = !values.is_empty();
        series.x.push(chunk[chunk.len() / 2].0);
        series.y.push(is_known.then(|| rounded(values.iter().sum::<f64>() / values.len() as f64)));
        if together > 1 {
            series.lo.push(is_known.then(|| rounded(values.iter().copied().fold(f64::INFINITY, f64::min))));
            series
                .hi
                .push(is_known.then(|| rounded(values.iter().copied().fold(f64::NEG_INFINITY, f64::max))));
        }
    }
    series
}

/// Returns the maximum of each group of values, at its own step.
pub(super) fn maxima(points: &[Point]) -> Series {
    let together = points.len().div_ceil(MAX_POINTS).max(1);
    let greatest = points.chunks(together).filter_map(|chunk| {
        let known = chunk.iter().filter_map(|&(step, value)| Some((step, value?)));
        known.max_by(|a, b| a.1.total_cmp(&b.1))
    });
    let (x, y) = greatest.map(|(step, value)| (step, Some(rounded(value)))).unzip();
    Series { x, y, ..Series::default() }
}

/// Returns an exponential moving average over about a twentieth of the steps (4 to 500), with bias correction.
pub(super) fn smoothed(points: &[Point]) -> Vec<Point> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 20.0).clamp(4.0, 500.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    points
        .iter()
        .map(|&(step, value)| {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                sum = keep * sum + (1.0 - keep) * value;
                weight = keep * weight + (1.0 - keep);
            }
            (step, (weight > 0.0).then(|| sum / weight))
        })
        .collect()
}

fn finite(points: &[Point]) -> impl Iterator<Item = f64> {
    points.iter().filter_map(|point| point.1).filter(|value| value.is_finite())
}

/// Rounds to six significant digits; more are not visible and would make up most of the page.
fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_line_is_itself_and_keeps_its_gaps() {
        let points = [(1, Some(2.0)), (2, None), (3, Some(f64::NAN)), (4, Some(1.0 / 3.0))];
        let expected = Series {
            x: vec![1, 2, 3, 4],
            y: vec![Some(2.0), None, None, Some(0.333333)],
            ..Series::default()
        };
        assert_eq!(thinned_with_bounds(&points), expected);
    }

    #[test]
    fn a_long_line_keeps_its_ends_its_mean_and_its_only_spike() {
        let points: Vec<Point> =
            (1..=100_000).map(|step| (step, Some(if step == 77_777 { 9.0 } else { 1.0 }))).collect();
        let series = thinned_with_bounds(&points);
        assert!((500..=MAX_POINTS).contains(&series.x.len()), "{} points", series.x.len());
        assert!(series.x[0] < 200 && series.x.last().is_some_and(|&step| step > 99_800), "{:?}", series.x);
        assert_eq!(series.hi.iter().filter(|high| **high == Some(9.0)).count(), 1);
        assert!(series.lo.iter().all(|low| *low == Some(1.0)));
        assert!(maxima(&points).x.contains(&77_777));
    }

    #[test]
    fn a_smoothed_line_starts_at_its_first_value_and_goes_on_through_gaps() {
        let points = [(1, None), (2, Some(8.0)), (3, None), (4, Some(8.0)), (5, Some(0.0))];
        let smooth: Vec<Option<f64>> = smoothed(&points).into_iter().map(|point| point.1).collect();
        assert_eq!(smooth[..4], [None, Some(8.0), Some(8.0), Some(8.0)]);
        assert!(smooth[4].is_some_and(|value| (4.0..8.0).contains(&value)), "{smooth:?}");
    }
}
