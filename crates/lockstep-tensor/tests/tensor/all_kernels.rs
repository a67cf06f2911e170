//! Properties that all kernels share: empty operands are no error, NaN never turns into a number, and an output that
//! shares memory with another operand is refused.

use std::panic::{AssertUnwindSafe, catch_unwind};

use lockstep_plan::DType;
use lockstep_tensor::{
    Activation, Arena, Attention, AttentionKernels, AttentionVariant, AttentionWrite, BatchNorm,
    BatchNormKernels, Conv2d, ConvolutionKernels, CopyKernels, CpuLevel, CpuQueue, Dropout,
    ElementwiseKernels, EmbeddingKernels, GatedActivation, Gelu, Gemm, GemmKernels, GemmLayout, GroupedGemm,
    LayerNorm, LossKernels, NormKernels, OptimizerKernels, Permutation, PermutationKernels, Pool2d,
    PoolKernels, RmsNorm, Rotary, RotaryKernels, Rotation, Rounding, Router, RouterGradients, RouterKernels,
    RouterOutputs, RouterScores, RouterWeights, Sgd, Tensor, TokenPositions, TokenSpan, View, Window2d,
    Write,
};

use crate::testing::{ACTIVATIONS, adamw_step, floats, levels, random_of, tensor, values};

const ROWS: usize = 3;
/// A width that is not a multiple of any vector.
const WIDTH: usize = 43;
/// Row and column of the NaN: in the last row, beyond the last whole vector.
const ROW: usize = 2;
const COLUMN: usize = 41;

fn queue(level: CpuLevel) -> CpuQueue {
    CpuQueue::with_level(2, &Arena::new(), level).unwrap()
}

fn momentum_step<'a>([parameter, gradient, momentum_buffer]: [View<'a>; 3]) -> Sgd<'a> {
    Sgd {
        parameter,
        gradient,
        momentum_buffer: Some(momentum_buffer),
        rounded: None,
        rounding: Rounding::Nearest,
        learning_rate: 0.1,
        momentum: 0.9,
        weight_decay: 0.1,
        gradient_scale: 1.0,
        step: 2,
    }
}

/// An attention with one head of four elements.
fn attention(sequences: usize, query_len: usize, key_len: usize) -> Attention<'static> {
    Attention {
        sequences,
        queries: TokenSpan::whole(query_len),
        keys: TokenSpan::whole(key_len),
        heads: 1,
        key_value_heads: 1,
        head_dim: 4,
        scale: 0.5,
        window: None,
        document_starts: None,
        first_head: 0,
        dropout: None,
        variant: AttentionVariant::default(),
    }
}

#[test]
fn a_queue_asked_for_more_than_the_cpu_has_makes_do_with_that() {
    for level in CpuLevel::ALL {
        assert_eq!(queue(level).level(), level.min(CpuLevel::detect()));
    }
    assert_eq!(CpuQueue::new(1, &Arena::new()).unwrap().level(), CpuLevel::detect());
}

#[test]
fn no_tokens_leave_every_gradient_as_it_was() {
    for (level, dtype) in levels().flat_map(|level| ACTIVATIONS.map(|dtype| (level, dtype))) {
        let q = queue(level);
        let [x, dy, y] = [(); 3].map(|()| floats(dtype, [0, WIDTH], &[]));
        let [x, dy, y] = [x.view(), dy.view(), y.view()];
        let [mean, rstd] = [(); 2].map(|()| floats(DType::F32, [0], &[]));
        let (mean, rstd) = (mean.view(), rstd.view());
        let weight = floats(dtype, [WIDTH], &[1.0; WIDTH]);
        let weight = weight.view();
        let gradient = floats(DType::F32, [1, WIDTH], &[3.0; WIDTH]);
        let gradient = gradient.view();
        let sums = gradient.reshape([WIDTH]);
        let (ids, labels) = (tensor::<u32>(&[]), tensor::<i32>(&[]));
        q.sum_rows(x, sums);
        q.embedding(ids.view(), weight.reshape([1, WIDTH]), 0, y);
        q.embedding_backward(ids.view(), dy, 0, gradient);
        let norm = RmsNorm { x, weight, offset: 0.0, rstd };
        q.rms_norm(norm, 1e-5, y);
        q.rms_norm_backward_input(norm, dy, y, Write::Overwrite);
        q.rms_norm_backward_weight(norm, dy, sums);
        let norm = LayerNorm { x, weight, mean, rstd };
        q.layer_norm(norm, Some(weight), 1e-5, y);
        q.layer_norm_backward_input(norm, dy, y, Write::Accumulate);
        q.layer_norm_backward_weight(norm, dy, sums, None);
        q.rope(x, Rotary::new(ids.view(), rstd), Rotation::Forward, y);
        for kind in GatedActivation::ALL {
            q.gated(kind, x, dy, y);
        }
        let other = floats(dtype, [0, WIDTH], &[]);
        for kind in GatedActivation::ALL {
            q.gated_backward(kind, dy, x, x, y, other.view());
        }
        for kind in [Gelu::Exact, Gelu::Tanh] {
            q.gelu(kind, x, y);
            q.gelu_backward(kind, dy, x, y);
        }
        q.add(x, dy, y);
        q.scale(0.5, x, y);
        let keys = tensor(&[1_u32, 2]);
        let dropout = Dropout { probability: 0.5, site: 0, keys: keys.view() };
        q.dropout(dropout, TokenPositions::whole(0), 0, x, y);
        q.cross_entropy(x, labels.view(), rstd);
        q.cross_entropy_with_gradient(x, labels.view(), rstd, 1.0);
        let statistics = floats(DType::F32, [2, 3, 0], &[]);
        q.softmax_statistics(x, labels.view(), 7, statistics.view().rows(0..1));
        let losses = floats(DType::F32, [0], &[]);
        q.merge_softmax(statistics.view(), labels.view(), rstd, losses.view());
        q.softmax_gradient(x, labels.view(), 7, rstd, 1.0);
        route_nobody(&q, x, y);
        q.cast(x, y);
        q.zero(y);
        q.gemm(Gemm {
            layout: GemmLayout::TN,
            a: dy,
            b: x,
            c: floats(DType::F32, [WIDTH, WIDTH], &[0.0; WIDTH * WIDTH]).view(),
            bias: None,
            write: Write::Accumulate,
        });
        assert_eq!(values(gradient), [3.0; WIDTH], "{level} {dtype}");
    }
}

/// Runs the mixture-of-experts kernels on no tokens.
fn route_nobody(q: &CpuQueue, x: View<'_>, y: View<'_>) {
    let floats = |shape: [usize; 2]| floats(DType::F32, shape, &vec![9.0; shape[0] * shape[1]]);
    let [scores, log_sum_exp, weights, counts, sums] = [WIDTH, 1, 2, WIDTH, WIDTH].map(|n| floats([0, n]));
    let [experts, slots, rows] = [(); 3].map(|()| tensor::<u32>(&[]));
    let offsets = tensor(&[7_u32, 7]);
    let routed = RouterOutputs {
        scores: scores.view(),
        log_sum_exp: log_sum_exp.view(),
        experts: experts.view().reshape([0, 2]),
        weights: weights.view(),
    };
    let router = Router {
        top_k: 2,
        scores: RouterScores::Softmax,
        selection_bias: None,
        groups: None,
        weights: RouterWeights::Normalized,
        scale: 1.0,
    };
    let dweights = floats([0, 2]);
    let gradients =
        RouterGradients { weights: dweights.view(), probabilities: None, squared_log_sum_exp: 0.1 };
    let permutation = Permutation { slots: slots.view(), rows: rows.view() };
    q.router_top_k(&router, x, routed);
    q.router_top_k_backward(&router, x, routed, gradients, TokenPositions::whole(0), y);
    q.router_load(routed, TokenPositions::whole(0), counts.view(), sums.view());
    q.sort_slots(experts.view(), 0, permutation, offsets.view());
    assert_eq!(offsets.view().to_vec::<u32>(), [0, 0]);
    q.permute(permutation, x, y);
    q.unpermute(permutation, x, None, y);
    let drows = numbers(x.dtype(), [0, WIDTH], 1);
    q.unpermute_backward(permutation, x, y, weights.view(), drows.view(), dweights.view());
    let c = floats([1, WIDTH * WIDTH]);
    let c = c.view().reshape([1, WIDTH, WIDTH]);
    let (layout, write, offsets) = (GemmLayout::TN, Write::Overwrite, offsets.view());
    q.grouped_gemm(GroupedGemm { layout, a: x, b: y, c, bias: None, offsets, write });
    assert!(values(c).iter().all(|x| *x == 0.0), "products of no rows are not zero: {:?}", values(c));
}

#[test]
fn empty_shards_have_a_norm_of_zero_and_an_adamw_step() {
    for level in levels() {
        let q = queue(level);
        let empty = [(); 4].map(|()| floats(DType::F32, [0], &[]));
        let [p, g, m, v] = empty.each_ref().map(Tensor::view);
        q.adamw(&adamw_step([p, g, m, v]));
        q.sgd(&momentum_step([p, g, m]));
        assert_eq!(q.sum_of_squares(p).wait().value(), 0.0, "{level}");
    }
}

#[test]
fn attention_without_sequences_queries_or_keys_writes_what_there_is() {
    for level in levels() {
        let q = queue(level);
        for (sequences, query_len, key_len) in [(0, 5, 5), (2, 0, 5), (2, 5, 0)] {
            let geometry = attention(sequences, query_len, key_len);
            let tensor = |rows: usize, width: usize| {
                floats(DType::F32, [sequences * rows, width], &vec![9.0; sequences * rows * width])
            };
            let [query, out, dout, dq] = [(); 4].map(|()| tensor(query_len, 4));
            let [key, value, dk, dv] = [(); 4].map(|()| tensor(key_len, 4));
            let statistics = tensor(query_len, 1);
            let [query, out, dout, dq] = [query.view(), out.view(), dout.view(), dq.view()];
            let [key, value, dk, dv] = [key.view(), value.view(), dk.view(), dv.view()];
            q.attention(&geometry, query, key, value, out, statistics.view(), Write::Overwrite);
            let (statistics, all) = (statistics.view(), AttentionWrite::OVERWRITE);
            q.attention_backward(&geometry, query, key, value, out, statistics, dout, dq, dk, dv, all);
            for (name, view) in [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)] {
                assert!(values(view).iter().all(|x| *x == 0.0), "{name} at {level}: {:?}", values(view));
            }
            assert!(values(statistics).iter().all(|x| *x == f64::NEG_INFINITY), "{level}");
        }
    }
}

/// Runs the kernels of vision models on outputs that overlap another operand.
fn refuse_overlaps_of_vision(q: &CpuQueue, [a, b, c, d]: [View<'_>; 4], labels: View<'_>) {
    let (write, row_of_a) = (Write::Overwrite, row(a, 1));
    let conv = Conv2d::new([1, 4, 1, 4], 4, Window2d::square(1, 1, 0), 1).unwrap();
    assert_refused("conv2d", || q.conv2d(conv, a, b, None, a));
    assert_refused("conv2d's bias", || q.conv2d(conv, a, b, Some(row(c, 0)), c));
    assert_refused("conv2d_backward_input", || q.conv2d_backward_input(conv, a, b, a, write));
    assert_refused("conv2d_backward_weight", || q.conv2d_backward_weight(conv, a, b, a));
    let pool = Pool2d::new([1, 4, 1, 4], Window2d::square(1, 1, 0)).unwrap();
    let indices = tensor(&[0_u8; 16]);
    assert_refused("max_pool2d", || q.max_pool2d(pool, a, a, indices.view()));
    assert_refused("max_pool2d_backward", || q.max_pool2d_backward(pool, a, indices.view(), a, write));
    assert_refused("avg_pool2d", || q.avg_pool2d(pool, a, a));
    assert_refused("avg_pool2d_backward", || q.avg_pool2d_backward(pool, a, a, write));
    let norm = BatchNorm { x: a, weight: row(b, 0), mean: row(b, 1), rstd: row(b, 2) };
    assert_refused("batch_norm_statistics", || q.batch_norm_statistics(a, a.rows(0..3)));
    assert_refused("merge_batch_norm", || q.merge_batch_norm(a.rows(0..3), 1e-5, None, row_of_a, row(b, 0)));
    assert_refused("batch_norm", || q.batch_norm(norm, row(c, 0), a));
    assert_refused("batch_norm_backward_sums", || q.batch_norm_backward_sums(norm, c, a.rows(0..2)));
    assert_refused("batch_norm_backward_input", || {
        q.batch_norm_backward_input(norm, c, d.rows(0..2), 4, c, write);
    });
    assert_refused("cross_entropy_smoothed", || q.cross_entropy_smoothed(a, labels, 0.1, row_of_a));
    assert_refused("correct", || q.correct(a, labels, row_of_a));
    assert_refused("squared_error", || q.squared_error(a, b, row(b, 0)));
    let (x, longer) = (a.rows(0..3).reshape([1, 3, 4]), b.reshape([1, 4, 4]));
    assert_refused("prepend_row", || q.prepend_row(row(c, 0), x, a.reshape([1, 4, 4])));
    assert_refused("prepend_row_backward_input", || {
        q.prepend_row_backward_input(longer, b.rows(0..3).reshape([1, 3, 4]), write)
    });
    assert_refused("prepend_row_backward_row", || q.prepend_row_backward_row(longer, row(b, 0)));
    assert_refused("select_row", || q.select_row(x, 1, row_of_a));
    assert_refused("select_row_backward", || q.select_row_backward(row_of_a, 1, x, write));
    let of_sequence = tensor(&[1_u32]);
    assert_refused("select_rows", || q.select_rows(x, of_sequence.view(), row_of_a));
    assert_refused("select_rows_backward", || q.select_rows_backward(row_of_a, of_sequence.view(), x, write));
}

/// Creates `ROWS × WIDTH` numbers with a NaN at (`ROW`, `COLUMN`).
fn with_nan(dtype: DType, seed: u64) -> Tensor {
    let mut x = random_of(dtype, seed, ROWS * WIDTH);
    x[ROW * WIDTH + COLUMN] = f64::NAN;
    floats(dtype, [ROWS, WIDTH], &x)
}

fn numbers(dtype: DType, shape: [usize; 2], seed: u64) -> Tensor {
    floats(dtype, shape, &random_of(dtype, seed, shape[0] * shape[1]))
}

/// Panics unless exactly the elements for which `expected` holds are NaN.
#[track_caller]
fn assert_nan(name: &str, view: View<'_>, expected: impl Fn(usize) -> bool) {
    for (i, x) in values(view).into_iter().enumerate() {
        assert_eq!(x.is_nan(), expected(i), "{name}[{i}] is {x} ({view:?})");
    }
}

fn is_row(i: usize) -> bool {
    i / WIDTH == ROW
}

fn is_column(i: usize) -> bool {
    i % WIDTH == COLUMN
}

fn is_element(i: usize) -> bool {
    is_row(i) && is_column(i)
}

#[test]
fn a_nan_spreads_over_its_row_of_a_norm_and_its_column_of_the_weights_gradient() {
    for (level, dtype) in levels().flat_map(|level| ACTIVATIONS.map(|dtype| (level, dtype))) {
        let q = queue(level);
        let (bad, good) = (with_nan(dtype, 1), numbers(dtype, [ROWS, WIDTH], 2));
        let (bad, good) = (bad.view(), good.view());
        let [y, dx] = [(); 2].map(|()| numbers(dtype, [ROWS, WIDTH], 3));
        let (y, dx) = (y.view(), dx.view());
        let weight = numbers(dtype, [1, WIDTH], 4);
        let weight = weight.view().reshape([WIDTH]);
        let [mean, rstd, dweight, dbias] =
            [ROWS, ROWS, WIDTH, WIDTH].map(|n| floats(DType::F32, [n], &vec![0.0; n]));
        let [mean, rstd, dweight, dbias] = [mean.view(), rstd.view(), dweight.view(), dbias.view()];

        let norm = RmsNorm { x: bad, weight, offset: 1.0, rstd };
        q.rms_norm(norm, 1e-5, y);
        assert_nan("rms_norm y", y, is_row);
        assert_nan("rms_norm rstd", rstd, |row| row == ROW);
        let norm = RmsNorm { x: good, ..norm };
        q.rms_norm(norm, 1e-5, y);
        q.rms_norm_backward_input(norm, bad, dx, Write::Overwrite);
        assert_nan("rms_norm dx", dx, is_row);
        q.rms_norm_backward_weight(norm, bad, dweight);
        assert_nan("rms_norm dweight", dweight, is_column);

        let norm = LayerNorm { x: bad, weight, mean, rstd };
        q.layer_norm(norm, Some(weight), 1e-5, y);
        assert_nan("layer_norm y", y, is_row);
        assert_nan("layer_norm mean", mean, |row| row == ROW);
        assert_nan("layer_norm rstd", rstd, |row| row == ROW);
        let norm = LayerNorm { x: good, ..norm };
        q.layer_norm(norm, None, 1e-5, y);
        q.layer_norm_backward_input(norm, bad, dx, Write::Overwrite);
        assert_nan("layer_norm dx", dx, is_row);
        q.zero(dweight);
        q.layer_norm_backward_weight(norm, bad, dweight, Some(dbias));
        assert_nan("layer_norm dweight", dweight, is_column);
        assert_nan("layer_norm dbias", dbias, is_column);
        q.zero(dbias);
        q.sum_rows(bad, dbias);
        assert_nan("sum_rows", dbias, is_column);
    }
}

#[test]
fn a_nan_stays_in_its_element_of_elementwise_kernels() {
    for (level, dtype) in levels().flat_map(|level| ACTIVATIONS.map(|dtype| (level, dtype))) {
        let q = queue(level);
        let (bad, good) = (with_nan(dtype, 1), numbers(dtype, [ROWS, WIDTH], 2));
        let (bad, good) = (bad.view(), good.view());
        let [y, other] = [(); 2].map(|()| numbers(dtype, [ROWS, WIDTH], 3));
        let (y, other) = (y.view(), other.view());
        for (a, b) in [(bad, good), (good, bad)] {
            q.add(a, b, y);
            assert_nan("add", y, is_element);
            for kind in GatedActivation::ALL {
                q.gated(kind, a, b, y);
                assert_nan("gated", y, is_element);
            }
            for kind in [Gelu::Exact, Gelu::Tanh] {
                q.gelu_backward(kind, a, b, y);
                assert_nan("gelu_backward", y, is_element);
            }
        }
        for kind in GatedActivation::ALL {
            q.gated_backward(kind, bad, good, good, y, other);
            assert_nan("gated dgate", y, is_element);
            assert_nan("gated dup", other, is_element);
        }
        let keys = tensor(&[1_u32, 2]);
        let dropout = Dropout { probability: 0.0, site: 0, keys: keys.view() };
        q.dropout(dropout, TokenPositions::whole(ROWS), 0, bad, y);
        assert_nan("dropout", y, is_element);
        for to in [DType::F32, DType::BF16, DType::F16] {
            let converted = floats(to, [ROWS, WIDTH], &[0.0; ROWS * WIDTH]);
            q.cast(bad, converted.view());
            assert_nan("cast", converted.view(), is_element);
        }
        let (positions, frequencies) = (tensor(&[0_u32, 1, 7]), tensor(&[1.0_f32]));
        let even = WIDTH - 1;
        let x: Vec<f64> = values(bad).chunks(WIDTH).flat_map(|row| row[1..].to_vec()).collect();
        let rotated = floats(dtype, [ROWS, even / 2, 2], &x);
        let rotated = rotated.view();
        q.rope(rotated, Rotary::new(positions.view(), frequencies.view()), Rotation::Forward, rotated);
        assert_nan("rope", rotated, |i| i / even == ROW && i % even / 2 == (COLUMN - 1) / 2);
    }
}

#[test]
fn a_nan_gradient_reaches_its_weight_and_no_other() {
    for level in levels() {
        let q = queue(level);
        let operands = || {
            let gradient = with_nan(DType::F32, 1);
            let [parameter, m] = [2, 3].map(|seed| numbers(DType::F32, [ROWS, WIDTH], seed));
            [parameter, gradient, m, floats(DType::F32, [ROWS, WIDTH], &[0.5; ROWS * WIDTH])]
        };
        let [p, g, m, v] = operands();
        q.adamw(&adamw_step([p.view(), g.view(), m.view(), v.view()]));
        for (name, tensor) in [("adamw parameter", &p), ("exp_avg", &m), ("exp_avg_sq", &v)] {
            assert_nan(name, tensor.view(), is_element);
        }
        let [p, g, m, _] = operands();
        q.sgd(&momentum_step([p.view(), g.view(), m.view()]));
        assert_nan("sgd parameter", p.view(), is_element);
        assert_nan("momentum", m.view(), is_element);
    }
}

#[test]
fn a_nan_logit_spoils_its_token_unless_that_is_masked() {
    for (level, dtype) in levels().flat_map(|level| ACTIVATIONS.map(|dtype| (level, dtype))) {
        let q = queue(level);
        for masked in [false, true] {
            let logits = with_nan(dtype, 1);
            let labels = tensor(&[0, 1, if masked { -100 } else { 2 }]);
            let losses = floats(DType::F32, [ROWS], &[0.0; ROWS]);
            let [logits, losses] = [logits.view(), losses.view()];
            q.cross_entropy(logits, labels.view(), losses);
            assert_nan("losses", losses, |row| row == ROW && !masked);
            q.cross_entropy_with_gradient(logits, labels.view(), losses, 1.0);
            assert_nan("losses with the gradient", losses, |row| row == ROW && !masked);
            assert_nan("gradient", logits, |i| is_row(i) && !masked);
        }
    }
}

/// Panics unless `kernel` refuses operands that overlap.
#[track_caller]
fn assert_refused(name: &str, kernel: impl FnOnce()) {
    let refusal = catch_unwind(AssertUnwindSafe(kernel)).expect_err(name);
    let message = refusal.downcast_ref::<String>().map_or("", String::as_str);
    assert!(message.contains("overlaps"), "{name} panics with {message:?}");
}

fn row(view: View<'_>, index: usize) -> View<'_> {
    view.rows(index..index + 1).reshape([4])
}

/// Runs the kernels of mixtures of experts on outputs that overlap another operand.
fn refuse_overlaps_of_experts(q: &CpuQueue, [a, b, c, d, e]: [View<'_>; 5]) {
    let write = Write::Overwrite;
    let [row_of_a, row_of_b, row_of_c] = [a, b, c].map(|view| row(view, 1));
    let words = [(); 4].map(|()| tensor(&[0_u32; 4]));
    let [experts, slots, rows, offsets] = words.each_ref().map(Tensor::view);
    let permutation = Permutation { slots, rows };
    let stacked = b.reshape([1, 4, 4]);
    let grouped = GroupedGemm {
        layout: GemmLayout::NN,
        a,
        b: stacked,
        c,
        bias: None,
        offsets: offsets.rows(0..2),
        write,
    };
    assert_refused("grouped_gemm", || q.grouped_gemm(GroupedGemm { c: a, ..grouped }));
    assert_refused("grouped_gemm's bias", || {
        q.grouped_gemm(GroupedGemm { bias: Some(c.rows(0..1)), ..grouped });
    });
    assert_refused("sort_slots", || q.sort_slots(slots, 0, permutation, offsets));
    assert_refused("permute", || q.permute(permutation, a, a));
    assert_refused("unpermute", || q.unpermute(permutation, a, Some(row_of_b), b));
    assert_refused("unpermute drows", || q.unpermute_backward(permutation, a, b, row_of_c, a, row(d, 0)));
    assert_refused("unpermute dweights", || {
        q.unpermute_backward(permutation, a, b, row_of_c, d, row_of_c);
    });
    let router = Router {
        top_k: 1,
        scores: RouterScores::Softmax,
        selection_bias: None,
        groups: None,
        weights: RouterWeights::Scores,
        scale: 1.0,
    };
    let routed = RouterOutputs { scores: b, log_sum_exp: row_of_c, experts, weights: row(d, 0) };
    assert_refused("router_top_k", || {
        q.router_top_k(&router, a, RouterOutputs { weights: row_of_a, ..routed })
    });
    assert_refused("router_top_k's bias", || {
        q.router_top_k(&Router { selection_bias: Some(row_of_b), ..router }, a, routed);
    });
    let gradients = RouterGradients { weights: row(e, 0), probabilities: None, squared_log_sum_exp: 0.0 };
    assert_refused("router_top_k_backward", || {
        q.router_top_k_backward(&router, a, routed, gradients, TokenPositions::whole(4), b);
    });
    assert_refused("router_load", || q.router_load(routed, TokenPositions::whole(1), b, e));
}

#[test]
fn an_output_that_overlaps_another_operand_is_refused_by_every_kernel() {
    let q = &queue(CpuLevel::detect());
    let [a, b, c, d, e] = [(); 5].map(|()| floats(DType::F32, [4, 4], &[0.0; 16]));
    let [a, b, c, d, e] = [a.view(), b.view(), c.view(), d.view(), e.view()];
    let [row_of_a, row_of_b, row_of_c] = [a, b, c].map(|view| row(view, 1));
    let (ids, labels) = (tensor(&[0_u32; 4]), tensor(&[0_i32; 4]));
    let write = Write::Overwrite;
    let product = Gemm { layout: GemmLayout::NN, a, b, c, bias: None, write };
    assert_refused("gemm", || q.gemm(Gemm { c: a, ..product }));
    assert_refused("gemm's bias", || q.gemm(Gemm { bias: Some(row_of_c), ..product }));
    assert_refused("sum_rows", || q.sum_rows(a, row_of_a));
    assert_refused("embedding", || q.embedding(ids.view(), a, 0, a));
    assert_refused("embedding_backward", || q.embedding_backward(ids.view(), a, 0, a));
    let norm = RmsNorm { x: a, weight: row_of_b, offset: 0.0, rstd: row_of_c };
    assert_refused("rms_norm", || q.rms_norm(norm, 1e-5, a));
    assert_refused("rms_norm's statistic", || q.rms_norm(norm, 1e-5, c));
    assert_refused("rms_norm dx", || q.rms_norm_backward_input(norm, d, a, write));
    assert_refused("rms_norm dweight", || q.rms_norm_backward_weight(norm, b, row_of_a));
    let norm = LayerNorm { x: a, weight: row_of_b, mean: row_of_c, rstd: row(d, 0) };
    assert_refused("layer_norm", || q.layer_norm(norm, None, 1e-5, a));
    assert_refused("layer_norm's bias", || q.layer_norm(norm, Some(row(e, 0)), 1e-5, e));
    assert_refused("layer_norm dx", || q.layer_norm_backward_input(norm, e, e, write));
    assert_refused("layer_norm dweight", || q.layer_norm_backward_weight(norm, e, row(e, 0), None));
    assert_refused("layer_norm dbias", || q.layer_norm_backward_weight(norm, b, row(e, 0), Some(row(e, 0))));
    let (positions, frequencies) = (ids.view(), row_of_b.rows(0..2));
    assert_refused("rope", || {
        q.rope(a.rows(0..3), Rotary::new(positions.rows(0..3), frequencies), Rotation::Forward, a.rows(1..4));
    });
    let geometry = attention(1, 4, 4);
    assert_refused("attention", || q.attention(&geometry, a, b, c, a, row(d, 0), write));
    assert_refused("attention's statistic", || q.attention(&geometry, a, b, c, d, row(d, 0), write));
    let statistics = floats(DType::F32, [4], &[0.0; 4]);
    assert_refused("attention_backward", || {
        let all = AttentionWrite::OVERWRITE;
        q.attention_backward(&geometry, a, a, a, a, statistics.view(), a, b, c, c, all);
    });
    assert_refused("gated", || q.gated(GatedActivation::Silu, a, b, b));
    assert_refused("gated_backward", || q.gated_backward(GatedActivation::Silu, a, b, c, d, d));
    assert_refused("gelu", || q.gelu(Gelu::Exact, a, a));
    assert_refused("gelu_backward", || q.gelu_backward(Gelu::Exact, b, a, a));
    assert_refused("activation", || q.activation(Activation::Relu, a.rows(0..3), a.rows(1..4)));
    assert_refused("activation_backward", || q.activation_backward(Activation::Relu, b, a, a));
    refuse_overlaps_of_vision(q, [a, b, c, d], labels.view());
    assert_refused("add", || q.add(a.rows(0..3), b.rows(0..3), a.rows(1..4)));
    assert_refused("scale", || q.scale(0.5, a.rows(0..3), a.rows(1..4)));
    let keys = tensor(&[0_u32, 0]);
    let dropout = Dropout { probability: 0.5, site: 0, keys: keys.view() };
    assert_refused("dropout", || {
        q.dropout(dropout, TokenPositions::whole(3), 0, a.rows(0..3), a.rows(1..4));
    });
    assert_refused("cross_entropy", || q.cross_entropy(a, labels.view(), row_of_a));
    assert_refused("cross_entropy_with_gradient", || {
        q.cross_entropy_with_gradient(a, labels.view(), row_of_a, 1.0);
    });
    let parts = floats(DType::F32, [1, 3, 4], &[0.0; 12]);
    assert_refused("softmax_statistics", || q.softmax_statistics(a, labels.view(), 0, a.rows(0..3)));
    assert_refused("merge_softmax", || {
        q.merge_softmax(parts.view(), labels.view(), row_of_a, row_of_a);
    });
    assert_refused("softmax_gradient", || q.softmax_gradient(a, labels.view(), 0, row_of_a, 1.0));
    refuse_overlaps_of_experts(q, [a, b, c, d, e]);
    assert_refused("adamw", || q.adamw(&adamw_step([a, b, c, c])));
    assert_refused("adamw's gradient", || q.adamw(&adamw_step([a, a, c, d])));
    assert_refused("sgd", || q.sgd(&momentum_step([a, b, a])));
    assert_refused("cast", || q.cast(a, a));
}
