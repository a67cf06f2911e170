//! Rates of the crate `gemm` (that of candle and faer) on products from standard input, for `compare_gemm.py --program`.
//!
//! The input is the JSON of `lockstep bench gemm`; the output is the same with this crate's rates. As there, the fastest product of a
//! tenth of a second counts, operands lie as Lockstep has them, and TN is added to what is there.

use std::{env, error::Error, io, time::Instant};

use gemm::{Parallelism, gemm};
use serde_json::Value;

/// Fewest products that are timed.
const RUNS: usize = 5;
/// Seconds of each shape.
const SECONDS: f64 = 0.1;

fn main() -> Result<(), Box<dyn Error>> {
    let option = |name: &str| env::args().skip_while(|argument| argument != name).nth(1);
    if option("--precision").is_some_and(|precision| precision != "f32") {
        return Err("the crate gemm has no products of bf16; allowed: --precision f32".into());
    }
    let threads = option("--threads").map_or(Ok(1), |threads| threads.parse())?;
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    let mut rows: Vec<Value> = serde_json::from_reader(io::stdin())?;
    for row in &mut rows {
        let size = |name: &str| row[name].as_u64().ok_or_else(|| format!("a product without {name}: {row}"));
        let [m, n, k] = [size("m")?, size("n")?, size("k")?].map(|size| size as usize);
        let layout = row["layout"].as_str().ok_or("a product without a layout")?;
        row["gflops"] = rate(layout, [m, n, k], threads).into();
    }
    println!("{}", serde_json::to_string(&rows)?);
    Ok(())
}

/// Returns the GFLOP/s of the fastest product.
fn rate(layout: &str, [m, n, k]: [usize; 3], threads: usize) -> f64 {
    let matrix = |elements: usize| -> Vec<f32> {
        (0..elements).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.5).collect()
    };
    let (a, b, mut c) = (matrix(m * k), matrix(k * n), matrix(m * n));
    // Elements from one column to the next, and from one row to the next.
    let [a_columns, a_rows] = if layout == "TN" { [m as isize, 1] } else { [1, k as isize] };
    let [b_columns, b_rows] = if layout == "NT" { [k as isize, 1] } else { [1, n as isize] };
    let adds = layout == "TN";
    let (mut best, mut runs, begin) = (f64::INFINITY, 0, Instant::now());
    while runs < RUNS || begin.elapsed().as_secs_f64() < SECONDS {
        let start = Instant::now();
        // SAFETY: the strides are those of whole matrices, and the output is another one.
        unsafe {
            gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                1,
                n as isize,
                adds,
                a.as_ptr(),
                a_columns,
                a_rows,
                b.as_ptr(),
                b_columns,
                b_rows,
                1.0_f32,
                1.0,
                false,
                false,
                false,
                Parallelism::Rayon(threads),
            );
        }
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    2.0 * (m * n * k) as f64 / best / 1e9
}
